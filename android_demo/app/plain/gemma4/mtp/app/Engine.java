package gemma4.mtp.app;

import gemma4.mtp.Memory;
import gemma4.mtp.Pair;
import gemma4.mtp.ValueError;
import java.io.File;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.Executor;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * A bundle and its conversation on a thread of their own. All methods are called on the user interface's thread and
 * return at once; the screen is told there what comes of them. One thing runs at a time.
 */
public final class Engine {
    /** Who shows it. What there is to show is kept here, so that a screen may come and go. */
    public interface Screen {
        /** Something began or ended. */
        void changed();

        /** The last line of the transcript has grown. */
        void text(String piece);

        /** Of the answer that is being made. */
        void figures();

        /** done, total: bytes of an import, or runs of a benchmark. */
        void progress(String what, long done, long total);
    }

    /** A bundle that is ready. */
    public static final class Loaded {
        public final File bundle;
        public final Memory need;
        public final int contextTokens;
        public final int threads;
        /** Whether the checkpoint's chat template works here; else what is sent is a raw text that grows. */
        public final boolean chats;
        /** What everyone who runs it must know, or null. */
        public final String warning;
        /** Why the bundle's drafter cannot draft, or null. */
        public final String offReason;

        Loaded(File bundle, Memory need, int contextTokens, int threads, boolean chats, Pair pair) {
            this.bundle = bundle;
            this.need = need;
            this.contextTokens = contextTokens;
            this.threads = threads;
            this.chats = chats;
            warning = pair.manifest.warning();
            offReason = pair.offReason;
        }
    }

    /** A message and who wrote it. */
    public static final class Line {
        public final boolean user;
        public final StringBuilder text = new StringBuilder();

        Line(boolean user, String text) {
            this.user = user;
            this.text.append(text);
        }
    }

    private final Device device;
    private final Executor screenThread;
    private final ExecutorService thread = Executors.newSingleThreadExecutor();
    private final List<Line> transcript = new ArrayList<>();
    private Screen screen;
    private boolean busy;
    private Loaded loaded;
    private Failure failure;
    private Figures figures;
    private String stopReason;
    private Benchmark benchmark;
    private volatile boolean stopped;
    private volatile Model model; // set on the engine's thread

    public Engine(Device device, Executor screenThread) {
        this.device = device;
        this.screenThread = screenThread;
    }

    public void show(Screen shown) {
        screen = shown;
    }

    public void hide(Screen shown) {
        screen = screen == shown ? null : screen;
    }

    public boolean busy() {
        return busy;
    }

    /** Null where nothing is. */
    public Loaded loaded() {
        return loaded;
    }

    /** Of the last thing, or null. */
    public Failure failure() {
        return failure;
    }

    /** Of the last answer, or null. */
    public Figures figures() {
        return figures;
    }

    /** Of the last answer, as in Round, or null. */
    public String stopReason() {
        return stopReason;
    }

    /** The last one, as far as it is, or null. */
    public Benchmark benchmark() {
        return benchmark;
    }

    public List<Line> transcript() {
        return Collections.unmodifiableList(transcript);
    }

    /** In the place of what was loaded. force: even if it does not fit into memory. */
    public void load(final File bundle, final Settings settings, final boolean force) {
        if (busy) {
            return;
        }
        forget();
        start(bundle, new Runnable() {
            @Override
            public void run() {
                release();
                model = Model.load(bundle, settings, device, force);
            }
        }, new Runnable() {
            @Override
            public void run() {
                if (stopped) { // or closed, meanwhile
                    releaseLater();
                } else {
                    loaded = model.loaded;
                }
            }
        });
    }

    /** A message; the answer comes to the screen. */
    public void send(final String message, final Settings settings, final long seed) {
        if (busy || loaded == null) {
            return;
        }
        transcript.add(new Line(true, message));
        transcript.add(new Line(false, ""));
        start(null, new Runnable() {
            @Override
            public void run() {
                boolean good = false;
                try {
                    model.answer(message, settings, seed, new Model.Answer() {
                        @Override
                        public void at(String piece, Figures figures) {
                            tellText(piece);
                            tellFigures(figures, null);
                        }

                        @Override
                        public void ended(String piece, String stopReason, Figures figures) {
                            tellText(piece);
                            tellFigures(figures, stopReason);
                        }

                        @Override
                        public boolean stopped() {
                            return stopped;
                        }
                    });
                    good = true;
                } finally {
                    if (!good) {
                        tellWithdrawn();
                    }
                }
            }
        });
    }

    /** Plain and drafted in turns. */
    public void benchmark(final List<String> prompts, final int tokens, final int repeats) {
        if (busy || loaded == null) {
            return;
        }
        benchmark = null;
        start(null, new Runnable() {
            @Override
            public void run() {
                model.benchmark(prompts, tokens, repeats, new Model.Runs() {
                    @Override
                    public void at(int done, int total, Benchmark result) {
                        tellBenchmark(done, total, result);
                    }

                    @Override
                    public boolean stopped() {
                        return stopped;
                    }
                });
            }
        });
    }

    /** Copy a bundle into root, and load it. */
    public void importBundle(final BundleImport.Source source, final File root, final Settings settings) {
        if (busy) {
            return;
        }
        final File[] copied = new File[1];
        start(null, new Runnable() {
            @Override
            public void run() {
                copied[0] = BundleImport.run(source, root, new BundleImport.Progress() {
                    private long told;

                    @Override
                    public boolean at(String file, long done, long total) {
                        if (done - told >= total / 200 || done == total) {
                            told = done;
                            tellProgress(file, done, total);
                        }
                        return !stopped;
                    }
                });
            }
        }, new Runnable() {
            @Override
            public void run() {
                if (copied[0] != null && !stopped) {
                    load(copied[0], settings, false);
                }
            }
        });
    }

    /** Ends what runs after its step; what it has stays. A bundle that is being loaded is let go. */
    public void stop() {
        stopped = true;
    }

    /** A bundle's folder, or what is left of one. */
    public void delete(final List<File> folders) {
        if (busy) {
            return;
        }
        start(null, new Runnable() {
            @Override
            public void run() {
                for (File folder : folders) {
                    Bundles.delete(folder);
                }
            }
        });
    }

    public void newChat() {
        if (busy || loaded == null) {
            return;
        }
        transcript.clear();
        start(null, new Runnable() {
            @Override
            public void run() {
                model.conversation.clear();
            }
        });
    }

    /** Frees all that is loaded, after the step that runs. The engine can be used again. */
    public void close() {
        stop();
        forget();
        releaseLater();
    }

    private void releaseLater() {
        thread.execute(new Runnable() {
            @Override
            public void run() {
                release();
            }
        });
    }

    private void release() {
        if (model != null) {
            model.graphs.close();
            model = null;
            Runtime.getRuntime().gc(); // KV rows count as taken until then, and the next load asks what is free
        }
    }

    private void forget() {
        loaded = null;
        failure = null;
        benchmark = null;
        transcript.clear();
    }

    private void start(File bundle, Runnable task) {
        start(bundle, task, null);
    }

    /**
     * bundle: that the task loads, or null. after: on the screen's thread, when the task has ended well, or null; it
     * may start the next one.
     */
    private void start(final File bundle, final Runnable task, final Runnable after) {
        busy = true;
        stopped = false;
        failure = null;
        figures = null;
        stopReason = null;
        changed();
        thread.execute(new Runnable() {
            @Override
            public void run() {
                final Failure failed = attempt(bundle, task);
                screenThread.execute(new Runnable() {
                    @Override
                    public void run() {
                        busy = false;
                        failure = failed;
                        if (failed == null && after != null) {
                            after.run();
                        }
                        changed();
                    }
                });
            }
        });
    }

    /** Null if it went well. */
    private static Failure attempt(File bundle, Runnable task) {
        try {
            task.run();
            return null;
        } catch (ValueError error) {
            return new Failure(Failure.Problem.SENTENCE, error.getMessage(), bundle);
        } catch (Preflight.Refused error) {
            return new Failure(Failure.Problem.DOES_NOT_FIT, error.getMessage(), bundle);
        } catch (OutOfMemoryError error) {
            return new Failure(Failure.Problem.OUT_OF_MEMORY, String.valueOf(error.getMessage()), bundle);
        } catch (Throwable error) { // also a library that is not there, or a mapped file that has shrunk
            return new Failure(Failure.Problem.UNEXPECTED, String.valueOf(error), bundle);
        }
    }

    private void changed() {
        if (screen != null) {
            screen.changed();
        }
    }

    private void tellText(final String piece) {
        if (piece.isEmpty()) {
            return;
        }
        screenThread.execute(new Runnable() {
            @Override
            public void run() {
                if (!transcript.isEmpty()) { // closed meanwhile
                    transcript.get(transcript.size() - 1).text.append(piece);
                    if (screen != null) {
                        screen.text(piece);
                    }
                }
            }
        });
    }

    /** A message without an answer is not part of the conversation. */
    private void tellWithdrawn() {
        screenThread.execute(new Runnable() {
            @Override
            public void run() {
                for (int i = 0; i < 2 && !transcript.isEmpty(); i++) {
                    transcript.remove(transcript.size() - 1);
                }
                figures = null;
            }
        });
    }

    /** ended: the stop reason, or null while it goes on. */
    private void tellFigures(final Figures now, final String ended) {
        screenThread.execute(new Runnable() {
            @Override
            public void run() {
                if (loaded != null) { // else closed meanwhile
                    figures = now;
                    stopReason = ended;
                    if (screen != null) {
                        screen.figures();
                    }
                }
            }
        });
    }

    private void tellProgress(final String what, final long done, final long total) {
        screenThread.execute(new Runnable() {
            @Override
            public void run() {
                if (screen != null) {
                    screen.progress(what, done, total);
                }
            }
        });
    }

    private void tellBenchmark(final int done, final int total, final Benchmark result) {
        screenThread.execute(new Runnable() {
            @Override
            public void run() {
                if (loaded != null) { // else closed meanwhile
                    benchmark = result;
                    if (screen != null) {
                        screen.progress("", done, total);
                    }
                }
            }
        });
    }
}
