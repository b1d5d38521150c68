package gemma4.mtp;

import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * The core at the end of a pipe: a request a line, an answer a line, both JSON. tests/test_android_core.py asks, and
 * holds the answers against runtime_py's. An answer is {"error": sentence} where the core refuses.
 */
final class CoreTests {
    private final Map<String, Tokenizer> tokenizers = new LinkedHashMap<>();
    private final List<Pair> pairs = new ArrayList<>();
    private final List<Session> sessions = new ArrayList<>();
    private PythonGraphs graphs;

    private CoreTests() {}

    public static void main(String[] arguments) throws IOException {
        PrintStream out = new PrintStream(System.out, true, "US-ASCII");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, Manifest.UTF_8));
        CoreTests tests = new CoreTests();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Map<String, Object> answer = new LinkedHashMap<>();
            try {
                Map<String, Object> request = Fields.map(Json.parse(line), "request");
                answer.put("ok", tests.answer(new Request(request)));
            } catch (ValueError error) {
                answer.put("error", error.getMessage());
            } catch (OutOfMemoryError error) {
                answer.put("error", error.toString());
            }
            out.println(Answer.json(answer));
        }
        if (tests.graphs != null) {
            tests.graphs.close();
        }
    }

    /** What a request holds. */
    private static final class Request {
        private final Map<String, Object> values;

        Request(Map<String, Object> values) {
            this.values = values;
        }

        String text(String key) {
            return (String) values.get(key);
        }

        File file(String key) {
            return new File(text(key));
        }

        int integer(String key) {
            return ((Number) values.get(key)).intValue();
        }

        double number(String key) {
            return ((Number) values.get(key)).doubleValue();
        }

        List<Object> list(String key) {
            return Fields.list(values.get(key), key);
        }

        Request object(String key) {
            return new Request(Fields.map(values.get(key), key));
        }

        Map<String, String> texts(String key) {
            Map<String, String> texts = new LinkedHashMap<>();
            for (Map.Entry<String, Object> entry : Fields.map(values.get(key), key).entrySet()) {
                texts.put(entry.getKey(), (String) entry.getValue());
            }
            return texts;
        }

        int[] ids(String key) {
            return CoreTests.ids(list(key));
        }

        float[] floats(String key) {
            float[] floats = new float[list(key).size()];
            for (int i = 0; i < floats.length; i++) {
                floats[i] = (float) number(list(key).get(i));
            }
            return floats;
        }

        private static double number(Object value) {
            return ((Number) value).doubleValue();
        }
    }

    private static int[] ids(Object list) {
        List<Object> items = Fields.list(list, "ids");
        int[] ids = new int[items.size()];
        for (int i = 0; i < ids.length; i++) {
            ids[i] = ((Number) items.get(i)).intValue();
        }
        return ids;
    }

    private Object answer(Request request) throws IOException {
        switch (request.text("do")) {
            case "manifest":
                return manifest(request);
            case "tokenizer":
                return tokenize(request);
            case "open":
                return open(request);
            case "session":
                Pair pair = pairs.get(request.integer("pair"));
                Clock clock = Clock.SYSTEM;
                sessions.add(new Session(pair.target, pair.drafter, pair.manifest.tokens, request.integer("context"),
                    request.integer("margin"), clock));
                return sessions.size() - 1;
            case "generate":
                return generate(request);
            case "weigh":
                return weigh(request);
            case "uniform":
                double[] values = new double[request.integer("count")];
                for (int i = 0; i < values.length; i++) {
                    values[i] = Sampler.uniform(Long.parseUnsignedLong(request.text("seed")), i);
                }
                return values;
            case "costs":
                return costs(request);
            case "rounds":
                return rounds(request);
            case "chat":
                return chat(request);
            case "memory":
                Manifest bundle = Manifest.load(request.file("bundle"));
                Memory memory = new Memory(bundle, request.integer("context"), request.integer("margin"),
                    (Boolean) request.values.get("drafts"));
                return Arrays.asList(memory.weightsBytes, memory.drafterBytes, memory.kvBytes, Memory.residentBytes());
            case "threads":
                return Cpus.defaultThreads(request.file("sysfs"), 3);
            case "encode rows":
                return encodeRows(request);
            case "mapped":
                return mapped(request);
            case "table":
                return table(request);
            case "rope":
                Map<String, float[]> frequencies = new LinkedHashMap<>();
                frequencies.put(Manifest.SLIDING, request.floats("inv_freq"));
                frequencies.put(Manifest.FULL, request.floats("inv_freq"));
                Map<String, Tensor> rope = Rope.rows(frequencies, request.integer("first"), request.integer("count"));
                List<Object> parts = new ArrayList<>();
                for (String name : new String[] {"cos_full", "sin_full"}) {
                    float[] part = new float[rope.get(name).floats().remaining()];
                    rope.get(name).floats().get(part);
                    parts.add(part);
                }
                return parts;
            default:
                throw new IllegalArgumentException(request.text("do"));
        }
    }

    private static Object manifest(Request request) {
        Manifest manifest = Manifest.load(request.file("bundle"));
        manifest.checkHashes(request.file("bundle"), manifest.files.keySet());
        return manifest.name;
    }

    private Object tokenize(Request request) {
        String path = request.text("path");
        if (!tokenizers.containsKey(path)) {
            tokenizers.put(path, new Tokenizer(Vocabulary.load(new File(path), request.texts("special"))));
        }
        Tokenizer tokenizer = tokenizers.get(path);
        List<Object> answers = new ArrayList<>();
        for (Object item : request.list("texts")) {
            answers.add(tokenizer.encode((String) item));
        }
        for (Object item : request.list("decode")) {
            answers.add(tokenizer.decode(ids(item)));
        }
        for (Object bursts : request.list("stream")) {
            TextStream stream = new TextStream(tokenizer);
            List<Object> pieces = new ArrayList<>();
            for (Object burst : Fields.list(bursts, "bursts")) {
                pieces.add(stream.push(ids(burst)));
            }
            pieces.add(stream.flush());
            answers.add(pieces);
        }
        return answers;
    }

    private Object open(Request request) throws IOException {
        if (graphs == null) {
            graphs = new PythonGraphs(request.text("python"));
        }
        Pair pair = Pair.load(request.file("bundle"), policy(request.object("policy")), graphs);
        pairs.add(pair);
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("pair", pairs.size() - 1);
        answer.put("off_reason", pair.offReason);
        answer.put("context", pair.target.maxContextTokens());
        return answer;
    }

    private static DraftPolicy policy(Request request) {
        List<Object> drafters = request.list("drafters");
        if (request.values.get("draft_tokens") == null) {
            return DraftPolicy.auto(drafters.toArray(new String[0]));
        }
        return DraftPolicy.fixed(request.integer("draft_tokens"), request.text("schedule"), (String) drafters.get(0));
    }

    private static Sampling sampling(Request request) {
        return new Sampling((Boolean) request.values.get("do_sample"), request.number("temperature"),
            request.integer("top_k"), request.number("top_p"), request.number("min_p"),
            request.number("repetition_penalty"), Long.parseUnsignedLong(request.text("seed")));
    }

    private Object generate(Request request) {
        Session session = sessions.get(request.integer("session"));
        final int leaveAfter = request.integer("leave_after");
        final int breakAfter = request.integer("break_after");
        Session.Reply reply = session.generate(request.ids("prompt"), request.integer("max_new_tokens"),
            sampling(request.object("sampling")), policy(request.object("policy")), new Session.Listener() {
                private int rounds;

                @Override
                public boolean cancelled() {
                    return leaveAfter > 0 && rounds >= leaveAfter;
                }

                @Override
                public void round(Round round) {
                    if (++rounds == breakAfter) {
                        throw new OutOfMemoryError("of a test");
                    }
                }
            });
        Stats stats = new Stats(reply.rounds);
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("token_ids", reply.tokenIds);
        answer.put("stop_reason", reply.stopReason);
        answer.put("reused_tokens", reply.reusedTokens);
        answer.put("rerun_tokens", reply.rerunTokens);
        answer.put("drafted", stats.drafted);
        answer.put("accepted", stats.accepted);
        answer.put("drafted_at", stats.draftedAt);
        answer.put("accepted_at", stats.acceptedAt);
        answer.put("rounds", reply.rounds.size());
        return answer;
    }

    private static Object weigh(Request request) {
        List<Object> answers = new ArrayList<>();
        for (Object item : request.list("cases")) {
            Request one = new Request(Fields.map(item, "case"));
            Sampling sampling = sampling(one.object("sampling"));
            float[] logits = one.floats("logits");
            IntList text = new IntList(one.ids("text"));
            Map<String, Object> answer = new LinkedHashMap<>();
            answer.put("token", new Sampler(sampling, logits.length).choose(text, logits.clone()));
            if (!sampling.greedy() && sampling.repetitionPenalty == 1) {
                Sampler.Weighed weighed = Sampler.weigh(logits, sampling);
                answer.put("ids", weighed.ids);
                answer.put("weights", weighed.weights);
            }
            answers.add(answer);
        }
        return answers;
    }

    /** The plans of a machine and a text made of numbers; steps as tests/test_android_core.py makes them. */
    private static Object costs(Request request) {
        Costs costs = new Costs();
        List<Object> plans = new ArrayList<>();
        for (Object item : request.list("steps")) {
            Request step = new Request(Fields.map(item, "step"));
            Map<String, Integer> offers = new LinkedHashMap<>();
            for (Map.Entry<String, Object> offer : Fields.map(step.values.get("offers"), "offers").entrySet()) {
                offers.put(offer.getKey(), ((Number) offer.getValue()).intValue());
            }
            Costs.Plan plan = costs.decide(offers);
            plans.add(Arrays.asList(plan.source, plan.count, plan.probe));
            Costs.Trial trial = new Costs.Trial();
            trial.plan = plan;
            trial.drafted = plan.count;
            Request hits = step.object("hits");
            trial.accepted = plan.source == null ? 0 : Math.min(hits.integer(plan.source), plan.count);
            trial.tokens = trial.accepted + 1;
            trial.draftS = step.number("draft") * plan.count;
            trial.verifyS = ((Number) step.list("verify").get(plan.count)).doubleValue();
            for (String source : offers.keySet()) {
                int tried = source.equals(plan.source) ? plan.count : trial.tokens;
                if (source.equals(plan.source) || source.startsWith("ngram")) {
                    trial.agreed.put(source,
                        new int[] {Math.min(hits.integer(source), tried), Math.min(hits.integer(source) + 1, tried)});
                }
            }
            costs.learn(trial);
        }
        return Arrays.asList(plans, costs.explain("mtp"));
    }

    /** A case of tests/golden_rounds.json, replayed. */
    private static Object rounds(Request request) {
        List<Long> stops = longs(request.list("stops"));
        Doubles.Script script = new Doubles.Script(request.integer("window"), stops, request.integer("period"));
        Doubles.ScriptedTarget target = new Doubles.ScriptedTarget(
            script, request.integer("chunk_rows"), request.integer("context"), request.number("per_row"));
        List<Long> right = longs(request.list("right"));
        Drafter drafter = right.isEmpty() ? null : new Doubles.ScriptedDrafter(script, right);
        DraftPolicy policy = policy(request.object("policy"));
        KvCache cache = target.newCache(request.integer("context"), request.integer("margin"));
        IntList ids = new IntList();
        List<Object> rounds = new ArrayList<>();
        for (Object item : request.list("turns")) {
            Request turn = new Request(Fields.map(item, "turn"));
            ids.cut(ids.size() - turn.integer("cut"));
            cache.rewind(cache.held(Math.min(cache.length(), ids.size())));
            for (int id : turn.ids("more")) {
                ids.add(id);
            }
            Speculative loop = new Speculative(
                target, drafter, cache, ids, turn.integer("budget"), tokens(), policy, Sampling.GREEDY, target);
            for (Round round = loop.next(); round != null; round = loop.next()) {
                Map<String, Object> entry = new LinkedHashMap<>();
                entry.put("tokens", round.tokens);
                entry.put("drafted", round.drafted);
                entry.put("accepted", round.accepted);
                entry.put("drafter", round.drafter);
                entry.put("stop_reason", round.stopReason);
                entry.put("committed", cache.length());
                entry.put("calls", new ArrayList<Object>(target.calls));
                target.calls.clear();
                rounds.add(entry);
            }
        }
        return rounds;
    }

    /** Of every conversation the text; one that cannot be is its sentence. */
    private static Object chat(Request request) {
        ChatTurns turns = new ChatTurns(
            request.values.get("spec") == null ? null : new Specs.ChatSpec(request.values.get("spec"), "chat"));
        List<Object> texts = new ArrayList<>();
        for (Object conversation : request.list("conversations")) {
            List<ChatTurns.Message> messages = new ArrayList<>();
            for (Object item : Fields.list(conversation, "conversation")) {
                Map<String, Object> message = Fields.map(item, "message");
                messages.add(new ChatTurns.Message((String) message.get("role"), (String) message.get("content")));
            }
            try {
                texts.add(turns.render(messages));
            } catch (ValueError error) {
                texts.add("error: " + error.getMessage());
            }
        }
        return texts;
    }

    private static List<Long> longs(List<Object> values) {
        List<Long> longs = new ArrayList<>();
        for (Object value : values) {
            longs.add((Long) value);
        }
        return longs;
    }

    private static Specs.TokensSpec tokens() {
        return new Specs.TokensSpec(Json.parse("{\"bos\": 2, \"pad\": 0, \"eos\": [1], \"special\": {}}"), "tokens");
    }

    /** float32 rows [T, heads, D] as keys, written to a cache's rows of a dtype -> the bytes of its parts. */
    private static Object encodeRows(Request request) {
        int[] shape = request.ids("shape");
        Tensor rows = Tensor.floats(request.floats("values"), shape);
        KvRows encoded = new KvRows(shape[0], shape[1], shape[2], request.text("dtype"));
        encoded.encode(0, rows, rows, 0, shape[0]);
        Map<String, Object> parts = new LinkedHashMap<>();
        for (int part = 0; part < encoded.partCount(); part++) {
            byte[] bytes = new byte[encoded.view(part, 0, shape[0]).bytes().remaining()];
            encoded.view(part, 0, shape[0]).bytes().get(bytes);
            int[] unsigned = new int[bytes.length];
            for (int i = 0; i < bytes.length; i++) {
                unsigned[i] = bytes[i] & 0xff;
            }
            parts.put(encoded.partName(part), unsigned);
        }
        return parts;
    }

    private static Object mapped(Request request) {
        Specs.ArraySpec spec = new Specs.ArraySpec(request.values.get("spec"), "spec");
        MappedArray mapped = new MappedArray(request.file("folder"), spec);
        List<Object> found = new ArrayList<>();
        for (int row : request.ids("rows")) {
            float[] values = new float[mapped.columns];
            mapped.read(row, values);
            found.add(values);
        }
        return found;
    }

    private static Object table(Request request) {
        Manifest manifest = Manifest.load(request.file("bundle"));
        Specs.TableSpec spec = request.text("name").equals("per_layer")
            ? manifest.target.perLayerTable
            : manifest.backends.get(Pair.BACKEND).tokenTable;
        EmbeddingTable table = new EmbeddingTable(request.file("bundle"), spec);
        List<Object> rows = new ArrayList<>();
        for (int id : request.ids("ids")) {
            rows.add(table.row(id));
        }
        return rows.isEmpty() ? Collections.emptyList() : rows;
    }
}
