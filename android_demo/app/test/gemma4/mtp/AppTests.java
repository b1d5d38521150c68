package gemma4.mtp;

import gemma4.mtp.app.Benchmark;
import gemma4.mtp.app.BundleImport;
import gemma4.mtp.app.Bundles;
import gemma4.mtp.app.Device;
import gemma4.mtp.app.Engine;
import gemma4.mtp.app.Failure;
import gemma4.mtp.app.Figures;
import gemma4.mtp.app.Settings;
import java.io.BufferedReader;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Constructor;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Executor;
import java.util.concurrent.LinkedBlockingQueue;

/**
 * What the app is made of besides its screens, at the end of a pipe as in CoreTests; tests/test_android_app.py asks.
 * The thread that reads requests is the screens' one.
 */
final class AppTests implements Executor, Device, Engine.Screen {
    private final BlockingQueue<Runnable> posted = new LinkedBlockingQueue<>();
    private final Engine engine = new Engine(this, this);
    private final List<String> heard = new ArrayList<>();
    private String python; // null: graphs are onnxruntime's
    private long available = Long.MAX_VALUE;
    private long heap = Long.MAX_VALUE;
    private int leaveAfter = Integer.MAX_VALUE; // pieces of an answer, files of an import, runs of a benchmark
    private boolean leaveAtEnd; // of an import's files
    private int open; // graphs that were not closed

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, true, "US-ASCII");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, Manifest.UTF_8));
        AppTests tests = new AppTests();
        tests.engine.show(tests);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                answer.put("ok", tests.answer(Fields.map(Json.parse(line), "request")));
            } catch (ValueError error) {
                answer.put("error", error.getMessage());
            }
            out.println(Answer.json(answer));
        }
        tests.engine.close();
        System.exit(0); // the engine's thread would wait for more
    }

    private Object answer(Map<String, Object> request) throws Exception {
        heard.clear();
        leaveAfter = request.containsKey("leave_after") ? number(request, "leave_after") : Integer.MAX_VALUE;
        leaveAtEnd = Boolean.TRUE.equals(request.get("leave_at_end"));
        switch ((String) request.get("do")) {
            case "settings":
                return settings(request);
            case "bundles":
                return paths(Bundles.in(new File((String) request.get("root"))));
            case "files":
                return Bundles.files(Manifest.load(new File((String) request.get("bundle"))));
            case "import":
                engine.importBundle(
                    folder((String) request.get("source")), new File((String) request.get("root")), fields(request));
                return settle();
            case "load":
                python = (String) request.get("python");
                available = (Long) request.get("available");
                heap = (Long) request.get("heap");
                engine.load(new File((String) request.get("bundle")), fields(request),
                    Boolean.TRUE.equals(request.get("force")));
                atOnce(request);
                return settle();
            case "send":
                engine.send((String) request.get("message"), fields(request), (Long) request.get("seed"));
                atOnce(request);
                return settle();
            case "benchmark":
                engine.benchmark(texts(request, "prompts"), number(request, "tokens"), number(request, "repeats"));
                atOnce(request);
                return settle();
            case "delete":
                engine.delete(Collections.singletonList(new File((String) request.get("folder"))));
                return settle();
            case "new chat":
                engine.newChat();
                return settle();
            default:
                engine.close();
                engine.newChat(); // does nothing, for nothing is loaded
                return settle();
        }
    }

    /** What a user does before the engine's thread has begun. */
    private void atOnce(Map<String, Object> request) {
        if ("stop".equals(request.get("at_once"))) {
            engine.stop();
        } else if ("close".equals(request.get("at_once"))) {
            engine.close();
        }
    }

    private static int number(Map<String, Object> request, String key) {
        return ((Long) request.get(key)).intValue();
    }

    private static List<String> texts(Map<String, Object> request, String key) {
        List<String> texts = new ArrayList<>();
        for (Object text : Fields.list(request.get(key), key)) {
            texts.add((String) text);
        }
        return texts;
    }

    private static Settings fields(Map<String, Object> request) {
        Map<String, String> fields = new LinkedHashMap<>();
        for (Map.Entry<String, Object> entry : Fields.map(request.get("fields"), "fields").entrySet()) {
            fields.put(entry.getKey(), (String) entry.getValue());
        }
        return new Settings(fields);
    }

    private static Object settings(Map<String, Object> request) {
        Settings settings = fields(request);
        Manifest manifest = Manifest.load(new File((String) request.get("bundle")));
        Sampling sampling = settings.sampling(manifest.sampling, 7);
        Map<String, Object> told = new LinkedHashMap<>();
        told.put("drafting", settings.drafting);
        told.put("context", settings.contextTokens);
        told.put("threads", settings.threads());
        told.put("do_sample", sampling.doSample);
        told.put("temperature", sampling.temperature);
        told.put("top_k", sampling.topK);
        told.put("top_p", sampling.topP);
        return told;
    }

    private static List<String> paths(List<File> files) {
        List<String> paths = new ArrayList<>();
        for (File file : files) {
            paths.add(file.getPath());
        }
        return paths;
    }

    private static BundleImport.Source folder(final String root) {
        return new BundleImport.Source() {
            @Override
            public InputStream open(String path) throws IOException {
                File file = new File(root, path);
                return file.isFile() ? new FileInputStream(file) : null;
            }
        };
    }

    /** Runs what the engine posts until it rests -> what a screen could show then. */
    private Map<String, Object> settle() throws InterruptedException {
        while (engine.busy()) {
            posted.take().run();
        }
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("heard", new ArrayList<>(heard));
        shown.put("open", open);
        List<Object> lines = new ArrayList<>();
        for (Engine.Line line : engine.transcript()) {
            lines.add((line.user ? "> " : "") + line.text);
        }
        shown.put("transcript", lines);
        shown.put("stop_reason", engine.stopReason());
        Failure failure = engine.failure();
        shown.put("failure", failure == null ? null : failure.kind.name());
        shown.put("detail", failure == null ? null : failure.detail);
        showLoaded(shown);
        showFigures(shown);
        Benchmark benchmark = engine.benchmark();
        if (benchmark != null && benchmark.complete()) {
            shown.put("runs", new int[] {benchmark.plain.runs(), benchmark.drafted.runs()});
            shown.put("same_texts", benchmark.sameTexts);
            shown.put("tokens_per_round",
                new double[] {benchmark.plain.tokensPerRound(), benchmark.drafted.tokensPerRound()});
            shown.put("acceptance", new double[] {benchmark.plain.acceptance(), benchmark.drafted.acceptance()});
            Benchmark.Row row = benchmark.drafted;
            shown.put("speeds", new double[] {row.lowest(), row.median(), row.highest()});
        }
        return shown;
    }

    private void showLoaded(Map<String, Object> shown) {
        Engine.Loaded loaded = engine.loaded();
        shown.put("loaded", loaded == null ? null : loaded.bundle.getPath());
        if (loaded != null) {
            shown.put("context", loaded.contextTokens);
            shown.put("threads", loaded.threads);
            shown.put("chats", loaded.chats);
            shown.put("warning", loaded.warning);
            shown.put("off_reason", loaded.offReason);
        }
    }

    private void showFigures(Map<String, Object> shown) {
        Figures figures = engine.figures();
        if (figures != null) {
            shown.put("tokens_per_second", figures.tokensPerSecond);
            shown.put("first_token_s", figures.firstTokenS);
            shown.put("drafts", figures.drafts);
            shown.put("draft_off", figures.offReason);
            shown.put("resident", figures.residentBytes);
        }
    }

    // The screens' thread, the device, the screen

    @Override
    public void execute(Runnable work) {
        posted.add(work);
    }

    @Override
    public Device.Graphs graphs(int threads) {
        open++;
        try {
            final Device.Graphs graphs = python == null ? onnxruntime(threads) : new HeldByPython(python);
            return new Device.Graphs() {
                @Override
                public Graph load(File model, Specs.GraphSpec spec) {
                    return graphs.load(model, spec);
                }

                @Override
                public int threads() {
                    return graphs.threads();
                }

                @Override
                public void close() {
                    open--;
                    graphs.close();
                }
            };
        } catch (IOException | ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    /** The app's own, where it was compiled too. */
    private static Device.Graphs onnxruntime(int threads) throws ReflectiveOperationException {
        Constructor<?> made = Class.forName("gemma4.mtp.app.OrtGraphs").getDeclaredConstructor(int.class);
        made.setAccessible(true);
        return (Device.Graphs) made.newInstance(threads);
    }

    private static final class HeldByPython implements Device.Graphs {
        private final PythonGraphs graphs;

        HeldByPython(String python) throws IOException {
            graphs = new PythonGraphs(python);
        }

        @Override
        public Graph load(File model, Specs.GraphSpec spec) {
            return graphs.load(model, spec);
        }

        @Override
        public int threads() {
            return 1;
        }

        @Override
        public void close() {
            try {
                graphs.close();
            } catch (IOException error) {
                throw new IllegalStateException(error);
            }
        }
    }

    @Override
    public long availableBytes() {
        if (available < 0) {
            throw new AssertionError("no such service");
        }
        return available;
    }

    @Override
    public long heapBytes() {
        return heap;
    }

    @Override
    public long residentBytes() {
        return Memory.residentBytes();
    }

    @Override
    public void changed() {
        heard.add(engine.busy() ? "busy" : "rests");
    }

    private void leave() {
        if (--leaveAfter == 0) {
            engine.stop();
        }
    }

    @Override
    public void text(String piece) {
        leave();
    }

    @Override
    public void figures() {}

    @Override
    public void progress(String what, long done, long total) {
        heard.add(what + " " + done + "/" + total);
        leave();
        if (leaveAtEnd && done == total) {
            engine.stop();
        }
    }
}
