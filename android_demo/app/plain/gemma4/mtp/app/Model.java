package gemma4.mtp.app;

import gemma4.mtp.Clock;
import gemma4.mtp.DraftPolicy;
import gemma4.mtp.Manifest;
import gemma4.mtp.Memory;
import gemma4.mtp.Pair;
import gemma4.mtp.Round;
import gemma4.mtp.Sampling;
import gemma4.mtp.Session;
import gemma4.mtp.TextStream;
import java.io.File;
import java.util.ArrayList;
import java.util.List;

/** A loaded bundle with one conversation. For one thread. */
final class Model {
    /** Hears of an answer while it is made. */
    interface Answer {
        void at(String piece, Figures figures);

        void ended(String piece, String stopReason, Figures figures);

        /** Whether somebody wants it to end. */
        boolean stopped();
    }

    /** Hears of a benchmark's runs. */
    interface Runs {
        void at(int done, int total, Benchmark result);

        boolean stopped();
    }

    final Engine.Loaded loaded;
    final Device.Graphs graphs;
    final Conversation conversation;
    private final Session session;
    private final Device device;
    private final Pair pair;
    private Settings settings; // of the policy
    private DraftPolicy policy;

    private Model(File bundle, Memory need, int contextTokens, Pair pair, Device.Graphs graphs, Device device) {
        this.pair = pair;
        this.graphs = graphs;
        this.device = device;
        session = new Session(
            pair.target, pair.drafter, pair.manifest.tokens, contextTokens, Session.MARGIN_ROWS, Clock.SYSTEM);
        conversation = new Conversation(pair);
        loaded = new Engine.Loaded(bundle, need, contextTokens, graphs.threads(), conversation.chats(), pair);
    }

    /** The drafter too, whatever the settings say, for they may change. ValueError or Refused if it cannot be. */
    static Model load(File bundle, Settings settings, Device device, boolean force) {
        Manifest manifest = Manifest.load(bundle);
        int context = (int) Math.min(settings.contextTokens, Pair.backend(manifest).maxContextTokens);
        Memory need = new Memory(manifest, context, Session.MARGIN_ROWS, true);
        Preflight.checkHeap(need.kvBytes, device.heapBytes(), context);
        if (!force) {
            Preflight.checkFits(need, device.availableBytes());
        }
        Device.Graphs graphs = device.graphs(settings.threads());
        boolean good = false;
        try {
            Pair pair = Pair.load(bundle, DraftPolicy.auto("mtp", "ngram"), graphs);
            Model model = new Model(bundle, need, context, pair, graphs, device);
            good = true;
            return model;
        } finally {
            if (!good) {
                graphs.close();
            }
        }
    }

    /** ValueError if it cannot be answered; nothing has changed then. */
    void answer(String message, Settings asked, long seed, final Answer answer) {
        if (settings == null || !settings.draftsAs(asked)) {
            policy = pair.offReason == null ? asked.newPolicy() : pair.policy;
        }
        settings = asked;
        int[] prompt = conversation.prompt(message);
        final TextStream stream = new TextStream(pair.tokenizer);
        final StringBuilder text = new StringBuilder();
        final double started = Clock.SYSTEM.seconds();
        Sampling sampling = asked.sampling(pair.manifest.sampling, seed);
        Session.Listener listener = new Session.Listener() {
            private final List<Round> rounds = new ArrayList<>();
            private double first;

            @Override
            public boolean cancelled() {
                return answer.stopped();
            }

            @Override
            public void round(Round round) {
                double now = Clock.SYSTEM.seconds();
                first = rounds.isEmpty() ? now : first;
                rounds.add(round);
                String piece = stream.push(round.tokens);
                text.append(piece);
                answer.at(piece, figures(rounds, first - started, now - first));
            }
        };
        Session.Reply reply = session.generate(prompt, session.maxContextTokens(), sampling, policy, listener);
        String rest = stream.flush();
        conversation.answered(message, prompt, reply.tokenIds, text + rest);
        answer.ended(rest, reply.stopReason, figures(reply.rounds, reply.prefillS, reply.decodeS));
    }

    private Figures figures(List<Round> rounds, double firstTokenS, double decodeS) {
        return new Figures(rounds, firstTokenS, decodeS, device.residentBytes(), offReason(policy));
    }

    private String offReason(DraftPolicy used) {
        if (pair.offReason != null) {
            return pair.offReason;
        }
        return settings != null && settings.drafting.equals(Settings.OFF) ? "it is switched off in the settings"
                                                                          : used.offReason();
    }

    /** Each prompt plain and drafted, who is first by turns; the first turn of all warms up and does not count. */
    void benchmark(List<String> prompts, int tokens, int repeats, Runs runs) {
        DraftPolicy plain = DraftPolicy.fixed(0, "constant", "mtp");
        DraftPolicy drafting = pair.offReason == null ? DraftPolicy.auto("mtp", "ngram") : pair.policy;
        Benchmark result = Benchmark.EMPTY;
        int total = 2 * prompts.size() * (repeats + 1);
        for (int done = 0; done < total && !runs.stopped(); done++) {
            int turn = done / 2 / prompts.size();
            String prompt = prompts.get(done / 2 % prompts.size());
            boolean drafts = (done + turn) % 2 == 1;
            Session.Reply reply = run(prompt, tokens, drafts ? drafting : plain, runs);
            if (turn > 0 && !runs.stopped()) {
                String offReason = pair.offReason == null ? drafting.offReason() : pair.offReason;
                result = result.with(prompt, drafts, reply, offReason);
            }
            runs.at(done + 1, total, result);
        }
    }

    private Session.Reply run(String prompt, int tokens, DraftPolicy used, final Runs runs) {
        int[] ids = pair.tokenizer.encodePrompt(prompt, pair.manifest.tokens.bos);
        int context = Math.min(ids.length + tokens, pair.target.maxContextTokens());
        Session fresh = new Session(pair.target, pair.drafter, pair.manifest.tokens, context, 0, Clock.SYSTEM);
        return fresh.generate(ids, tokens, Sampling.GREEDY, used, new Session.Listener() {
            @Override
            public boolean cancelled() {
                return runs.stopped();
            }

            @Override
            public void round(Round round) {}
        });
    }
}
