package gemma4.mtp.app;

import android.app.ActivityManager;
import android.content.Context;
import android.os.Handler;
import android.os.Looper;
import gemma4.mtp.ChatTurns;
import gemma4.mtp.Clock;
import gemma4.mtp.DraftPolicy;
import gemma4.mtp.Manifest;
import gemma4.mtp.Memory;
import gemma4.mtp.Pair;
import gemma4.mtp.Round;
import gemma4.mtp.Sampling;
import gemma4.mtp.Session;
import gemma4.mtp.Stats;
import gemma4.mtp.TextStream;
import gemma4.mtp.ValueError;
import java.io.File;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * A loaded bundle and its conversation, on a thread of their own. Methods are called on the main thread, and so is the
 * screen; whatever goes wrong is a sentence on it.
 */
final class Engine {
    /** What shows the engine's words. */
    interface Screen {
        void status(String line);

        /** More of the model's text. */
        void text(String piece);

        /** What was asked for is done, or has failed; the status says which. */
        void ready();
    }

    private static final double HEAP_SHARE =
        0.8; // that KV rows may take: Android counts direct buffers as the app's heap

    private final Context context;
    private final Settings settings;
    private final Handler main = new Handler(Looper.getMainLooper());
    private final ExecutorService worker = Executors.newSingleThreadExecutor();
    private final List<ChatTurns.Message> history = new ArrayList<>();
    private OrtGraphs graphs;
    private volatile Pair pair;
    private DraftPolicy policy;
    private volatile Session session;
    private volatile boolean busy;
    private Screen screen;

    Engine(Context context, Settings settings) {
        this.context = context;
        this.settings = settings;
    }

    void show(Screen shown) {
        screen = shown;
    }

    boolean busy() {
        return busy;
    }

    boolean loaded() {
        return session != null;
    }

    /** Whether what is sent is a message of a conversation; else it is a raw prompt. */
    boolean chats() {
        return pair != null && pair.manifest.chat != null;
    }

    /** Ends what runs after its block; what it has stays. */
    void stop() {
        Session running = session;
        if (running != null) {
            running.cancel();
        }
    }

    void newChat() {
        run(new Work() {
            @Override
            public void run() {
                history.clear();
            }
        });
    }

    void load(final File bundle) {
        run(new Work() {
            @Override
            public void run() {
                release();
                status(context.getString(R.string.loading, bundle.getName()));
                Manifest manifest = Manifest.load(bundle);
                int tokens = settings.context((int) Math.min(Integer.MAX_VALUE, manifest.target.maxContextTokens));
                Memory need = new Memory(manifest, tokens, Session.MARGIN_ROWS, true);
                long free = availableBytes();
                if (need.totalBytes() > free) {
                    throw new ValueError(context.getString(
                        R.string.does_not_fit, bundle.getName(), need.describe(), Memory.megabytes(free)));
                }
                long heap = Runtime.getRuntime().maxMemory();
                if (need.kvBytes > HEAP_SHARE * heap) {
                    throw new ValueError(context.getString(
                        R.string.heap_too_small, tokens, Memory.megabytes(need.kvBytes), Memory.megabytes(heap)));
                }
                graphs = new OrtGraphs(settings.threads());
                try {
                    open(bundle, tokens);
                } catch (RuntimeException | OutOfMemoryError error) {
                    release(); // not half of a bundle
                    throw error;
                }
                settings.setBundle(bundle.getPath());
                status(loadedLine(bundle, need));
            }
        });
    }

    private void open(File bundle, int tokens) {
        pair = Pair.load(bundle, DraftPolicy.auto("mtp", "ngram"), graphs);
        policy = pair.policy;
        int most = Math.min(tokens, pair.target.maxContextTokens());
        session = new Session(pair.target, pair.drafter, pair.manifest.tokens, most, Session.MARGIN_ROWS, Clock.SYSTEM);
    }

    private String loadedLine(File bundle, Memory need) {
        StringBuilder notes = new StringBuilder();
        if (pair.manifest.warning() != null) {
            notes.append(pair.manifest.warning()).append(". ");
        }
        if (pair.offReason != null) {
            notes.append(context.getString(R.string.drafting_is_off, pair.offReason)).append(". ");
        }
        if (pair.manifest.chat == null) {
            notes.append(context.getString(R.string.no_chat));
        }
        return notes.length() == 0 ? context.getString(R.string.loaded, bundle.getName(), need.describe())
                                   : context.getString(R.string.loaded_with, bundle.getName(), need.describe(), notes);
    }

    /** The user's message or prompt; the answer comes to the screen. */
    void send(final String message) {
        run(new Work() {
            @Override
            public void run() {
                choosePolicy();
                List<ChatTurns.Message> asked = new ArrayList<>(history);
                asked.add(new ChatTurns.Message(ChatTurns.USER, message));
                int[] prompt = pair.manifest.chat == null
                    ? pair.tokenizer.encodePrompt(message, pair.manifest.tokens.bos)
                    : pair.tokenizer.encode(new ChatTurns(pair.manifest.chat).render(asked));
                Reply reply = new Reply();
                Session.Reply done = session.generate(prompt, session.maxContextTokens(), sampling(), policy, reply);
                reply.finish();
                if (pair.manifest.chat != null) {
                    history.clear();
                    history.addAll(asked);
                    history.add(new ChatTurns.Message(ChatTurns.ASSISTANT, reply.text.toString()));
                }
                boolean full = done.stopReason.equals("context");
                status(
                    full ? context.getString(R.string.context_full) : line(done.rounds, done.prefillS, done.decodeS));
            }
        });
    }

    /** What the settings say now, where the drafter can draft; an automatic policy goes on with what it has learned. */
    private void choosePolicy() {
        boolean goesOn = policy.costs != null && settings.draftTokens() == Settings.AUTO;
        if (pair.offReason == null && !goesOn) {
            policy = settings.policy();
        }
    }

    private Sampling sampling() {
        return settings.sampling(pair.manifest.sampling, new SecureRandom().nextLong());
    }

    /** Plain and drafted in turns on one text, greedily. */
    void benchmark(final String prompt, final int tokens, final int repeats) {
        run(new Work() {
            @Override
            public void run() {
                int[] ids = pair.tokenizer.encodePrompt(prompt, pair.manifest.tokens.bos);
                DraftPolicy plain = DraftPolicy.fixed(0, "constant", "mtp");
                DraftPolicy drafted = pair.offReason == null ? DraftPolicy.auto("mtp", "ngram") : plain;
                Benchmark result = new Benchmark(context.getResources());
                for (int turn = 0; turn < 2 * repeats; turn++) {
                    DraftPolicy one = turn % 2 == 0 ? plain : drafted;
                    Session fresh = new Session(
                        pair.target, pair.drafter, pair.manifest.tokens, ids.length + tokens, 0, Clock.SYSTEM);
                    result.add(turn % 2 == 0, fresh.generate(ids, tokens, Sampling.GREEDY, one, new Session.Listener() {
                        @Override
                        public void round(Round round) {}
                    }));
                    status(result.lines());
                }
                if (pair.offReason != null) {
                    status(result.lines() + "\n" + context.getString(R.string.drafting_is_off, pair.offReason));
                }
            }
        });
    }

    /** Frees the graphs; for when the app is left. */
    void close() {
        stop();
        session = null;
        worker.execute(new Runnable() {
            @Override
            public void run() {
                release();
            }
        });
    }

    private void release() {
        session = null;
        pair = null;
        history.clear();
        if (graphs != null) {
            graphs.close();
            graphs = null;
        }
    }

    private long availableBytes() {
        ActivityManager.MemoryInfo info = new ActivityManager.MemoryInfo();
        ((ActivityManager) context.getSystemService(Context.ACTIVITY_SERVICE)).getMemoryInfo(info);
        return info.availMem;
    }

    /** Work on the engine's thread; it may throw a ValueError. */
    interface Work {
        void run();
    }

    /** One at a time. */
    void run(final Work work) {
        if (busy) {
            status(context.getString(R.string.busy));
            return;
        }
        busy = true;
        worker.execute(new Runnable() {
            @Override
            public void run() {
                try {
                    work.run();
                } catch (ValueError error) {
                    status(error.getMessage());
                } catch (OutOfMemoryError error) {
                    status(context.getString(R.string.out_of_memory));
                } catch (RuntimeException | LinkageError error) {
                    status(context.getString(R.string.failed, String.valueOf(error)));
                }
                busy = false;
                main.post(new Runnable() {
                    @Override
                    public void run() {
                        if (screen != null) {
                            screen.ready();
                        }
                    }
                });
            }
        });
    }

    void status(final String line) {
        main.post(new Runnable() {
            @Override
            public void run() {
                if (screen != null) {
                    screen.status(line);
                }
            }
        });
    }

    private void text(final String piece) {
        main.post(new Runnable() {
            @Override
            public void run() {
                if (screen != null && !piece.isEmpty()) {
                    screen.text(piece);
                }
            }
        });
    }

    private String line(List<Round> rounds, double prefillS, double decodeS) {
        int tokens = 0;
        for (Round round : rounds) {
            tokens += round.tokens.length;
        }
        if (tokens < 2) {
            return context.getString(R.string.prefill_only, prefillS);
        }
        Stats stats = new Stats(rounds);
        double aRound = (tokens - 1) / (double) Math.max(1, rounds.size() - 1);
        long megabytes = Memory.residentBytes() / 1000000;
        String line = context.getString(
            R.string.live, (tokens - 1) / decodeS, prefillS, stats.accepted, stats.drafted, aRound, megabytes);
        String off = pair.offReason != null ? pair.offReason : policy.offReason();
        return off == null ? line : line + "\n" + context.getString(R.string.drafting_is_off, off);
    }

    /** Streams an answer, and its speed a few times a second. */
    private final class Reply implements Session.Listener {
        private static final double EVERY_S = 0.5;

        private final StringBuilder text = new StringBuilder();
        private final List<Round> rounds = new ArrayList<>();
        private final TextStream stream = new TextStream(pair.tokenizer);
        private final double started = Clock.SYSTEM.seconds();
        private double first;
        private double told;

        @Override
        public void round(Round round) {
            double now = Clock.SYSTEM.seconds();
            first = rounds.isEmpty() ? now : first;
            rounds.add(round);
            append(stream.push(round.tokens));
            if (now - told > EVERY_S) {
                told = now;
                status(line(rounds, first - started, now - first));
            }
        }

        private void finish() {
            append(stream.flush());
        }

        private void append(String piece) {
            text.append(piece);
            Engine.this.text(piece);
        }
    }
}
