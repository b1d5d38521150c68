package gemma4.mtp;

import gemma4.mtp.Specs.TokensSpec;
import java.util.ArrayList;
import java.util.List;

/**
 * A text with its KV rows, kept from turn to turn: each call is given the whole text, and what it has in common with
 * the text of the call before is not run again. For one thread at a time.
 */
public final class Session {
    /** How far behind the open chunk a conversation may be rewound without running it again. */
    public static final int MARGIN_ROWS = 1024;

    /** What a call tells, and asks, while it runs. */
    public interface Listener {
        /** Asked after every block and every chunk of the prompt: true ends the call with what it has. */
        boolean cancelled();

        /** After every round: its tokens have just been added. */
        void round(Round round);
    }

    /**
     * reusedTokens: of the prompt, not run because their rows were held; rerunTokens: known from the call before, but
     * run again because rows had gone. prefillS: until the first token; decodeS: from the first token to the last.
     */
    public static final class Reply {
        public final int[] tokenIds;
        public final String stopReason;
        public final int promptTokens;
        public final int reusedTokens;
        public final int rerunTokens;
        public final List<Round> rounds;
        public final double prefillS;
        public final double decodeS;

        private Reply(
            int[] tokenIds, int promptTokens, int[] reused, List<Round> rounds, double prefillS, double decodeS) {
            this.tokenIds = tokenIds;
            this.stopReason = rounds.get(rounds.size() - 1).stopReason;
            this.promptTokens = promptTokens;
            this.reusedTokens = reused[0];
            this.rerunTokens = reused[1];
            this.rounds = rounds;
            this.prefillS = prefillS;
            this.decodeS = decodeS;
        }

        /** 0 where there are too few to tell. */
        public double tokensPerSecond() {
            return tokenIds.length > 1 ? (tokenIds.length - 1) / decodeS : 0;
        }
    }

    private final Target target;
    private final Drafter drafter;
    private final TokensSpec tokens;
    private final KvCache cache;
    private final Clock clock;
    private IntList ids = new IntList();

    /** drafter null: only lookup can draft. */
    public Session(
        Target target, Drafter drafter, TokensSpec tokens, int maxContextTokens, int marginRows, Clock clock) {
        this.target = target;
        this.drafter = drafter;
        this.tokens = tokens;
        this.clock = clock;
        cache = target.newCache(maxContextTokens, marginRows);
    }

    public int maxContextTokens() {
        return cache.maxContextTokens;
    }

    /** The text so far. */
    public int[] ids() {
        return ids.toArray();
    }

    /**
     * Continue a text by at most maxNewTokens. ValueError if that cannot be; the session is then unchanged. After an
     * Error, such as one of memory, it is empty.
     */
    public Reply generate(int[] prompt, int maxNewTokens, Sampling sampling, DraftPolicy policy, Listener listener) {
        try {
            return run(prompt, maxNewTokens, sampling, policy, listener);
        } catch (Error error) { // rows may be half written
            ids = new IntList();
            cache.rewind(0);
            throw error;
        }
    }

    private Reply run(int[] prompt, int maxNewTokens, Sampling sampling, DraftPolicy policy, Listener listener) {
        double started = clock.seconds();
        double first = started;
        int[] reused = begin(prompt, maxNewTokens);
        List<Round> rounds = new ArrayList<>();
        boolean chunks = true;
        while (chunks && !listener.cancelled()) {
            chunks = Speculative.prefillChunk(target, cache, ids);
        }
        if (chunks) {
            rounds.add(new Round(new int[0], 0, 0, "cancelled", null));
        } else {
            Speculative loop =
                new Speculative(target, drafter, cache, ids, maxNewTokens, tokens, policy, sampling, clock);
            for (Round round = loop.next(); round != null; round = loop.next()) {
                boolean leaves = round.stopReason == null && listener.cancelled();
                first = rounds.isEmpty() ? clock.seconds() : first;
                rounds.add(leaves ? round.stopped("cancelled") : round);
                listener.round(rounds.get(rounds.size() - 1));
                if (leaves) {
                    break;
                }
            }
        }
        double decodeS = clock.seconds() - first;
        int[] added = ids.slice(prompt.length, ids.size());
        return new Reply(added, prompt.length, reused, rounds, first - started, decodeS);
    }

    /**
     * Take over the prompt, rewound to what it has in common with the text so far -> tokens reused, tokens run again.
     */
    private int[] begin(int[] prompt, int maxNewTokens) {
        if (prompt.length == 0) {
            throw new ValueError("the prompt is empty; give at least one token");
        }
        int common = 0;
        while (common < Math.min(ids.size(), prompt.length) && ids.get(common) == prompt[common]) {
            common++;
        }
        int known = Math.min(Math.min(common, cache.length()), prompt.length - 1);
        int held = cache.held(known);
        IntList next = new IntList(prompt);
        Speculative.checkRequest(target, cache, next, maxNewTokens, held);
        cache.rewind(held);
        ids = next;
        return new int[] {held, known - held};
    }
}
