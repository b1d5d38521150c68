package gemma4.mtp.app;

import gemma4.mtp.Session;
import gemma4.mtp.Stats;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Plain and drafted runs of the same prompts, in turns. Each run makes a new one, which another thread may read. */
public final class Benchmark {
    static final Benchmark EMPTY = new Benchmark(new Row(), new Row(), new LinkedHashMap<String, int[]>(), true, null);

    /** One way of decoding over its runs. */
    public static final class Row {
        private final List<Double> speeds; // tokens a second, lowest first
        private final int drafted;
        private final int accepted;
        private final int rounds;
        private final int tokens;

        private Row() {
            this(new ArrayList<Double>(), 0, 0, 0, 0);
        }

        private Row(List<Double> speeds, int drafted, int accepted, int rounds, int tokens) {
            this.speeds = speeds;
            this.drafted = drafted;
            this.accepted = accepted;
            this.rounds = rounds;
            this.tokens = tokens;
        }

        private Row with(Session.Reply reply) {
            Stats stats = new Stats(reply.rounds);
            List<Double> all = new ArrayList<>(speeds);
            all.add(reply.tokensPerSecond());
            Collections.sort(all);
            // the first token is the prefill's
            return new Row(all, drafted + stats.drafted, accepted + stats.accepted, rounds + reply.rounds.size() - 1,
                tokens + reply.tokenIds.length - 1);
        }

        public int runs() {
            return speeds.size();
        }

        /** Tokens a second. */
        public double median() {
            int middle = speeds.size() / 2;
            return speeds.size() % 2 == 1 ? speeds.get(middle) : (speeds.get(middle - 1) + speeds.get(middle)) / 2;
        }

        public double lowest() {
            return speeds.get(0);
        }

        public double highest() {
            return speeds.get(speeds.size() - 1);
        }

        /** Of the drafts that were verified, 0 where there were none. */
        public double acceptance() {
            return drafted > 0 ? accepted / (double) drafted : 0;
        }

        public double tokensPerRound() {
            return rounds > 0 ? tokens / (double) rounds : 1;
        }
    }

    public final Row plain;
    public final Row drafted;
    /** Whether every prompt gave one text, as it does if the bundle is row-invariant. */
    public final boolean sameTexts;
    /** Why nothing was drafted in the end, or null. */
    public final String offReason;
    private final Map<String, int[]> texts; // prompt -> ids that were first made of it

    private Benchmark(Row plain, Row drafted, Map<String, int[]> texts, boolean sameTexts, String offReason) {
        this.plain = plain;
        this.drafted = drafted;
        this.texts = texts;
        this.sameTexts = sameTexts;
        this.offReason = offReason;
    }

    /** With one more run, a greedy reply. */
    Benchmark with(String prompt, boolean drafts, Session.Reply reply, String reason) {
        Map<String, int[]> known = new LinkedHashMap<>(texts);
        if (!known.containsKey(prompt)) {
            known.put(prompt, reply.tokenIds);
        }
        boolean same = sameTexts && Arrays.equals(known.get(prompt), reply.tokenIds);
        return new Benchmark(
            drafts ? plain : plain.with(reply), drafts ? drafted.with(reply) : drafted, known, same, reason);
    }

    /** Whether there is something to compare. */
    public boolean complete() {
        return plain.runs() > 0 && drafted.runs() > 0;
    }

    public double speedup() {
        return drafted.median() / plain.median();
    }
}
