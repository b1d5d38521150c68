package gemma4.mtp;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/**
 * How many tokens to draft, learned while running: what a verify of r rows costs, what a draft costs, which drafts are
 * accepted. The same record, constants and arithmetic as runtime_py/costs.py, whose comments say why. All times are
 * seconds.
 */
public final class Costs {
    public static final int MAX_DRAFT_TOKENS = 16;

    private static final double ROW_SHARE = 0.15;
    private static final double DRAFT_SHARE = 0.06;
    private static final double FIRST_CHANCE = 0.6;
    private static final double NEXT_SHARE = 0.95;
    private static final double OUTER = 0.7;
    private static final double STALE = 0.3;
    private static final double TIME_CLIP = 1.5;
    private static final double LOSS_CLIP = 3.0;
    private static final double TIME_SHARED = 0.05;
    private static final double TIME_KEPT = 0.99;
    private static final double TIME_WEIGHT = 30.0;
    private static final double CHANCE_KEPT = 0.98;
    private static final double CHANCE_KEPT_IDLE = 0.999;
    private static final double PROBE_SHARE = 0.005;
    private static final int PROBE_GAP = 5;
    private static final double CREDIT = 1.0;
    private static final double MAX_CREDIT = 2.0;
    private static final double GUARD = 5.0;
    private static final double MAX_GUARD = 30.0;

    /** weight: how many measurements it is worth. */
    static final class Mean {
        final double value;
        final double weight;

        Mean(double value, double weight) {
            this.value = value;
            this.weight = weight;
        }

        private Mean towards(double measured, double most) {
            double heavier = weight + 1;
            return new Mean(value + (measured - value) / heavier, Math.min(heavier, most));
        }
    }

    /**
     * source null: no drafts. probe: this is not what is expected to be fastest; loss: tokens expected to be lost by
     * it.
     */
    static final class Plan {
        static final Plan PLAIN = new Plan(null, 0, false, 0);

        final String source;
        final int count;
        final boolean probe;
        final double loss;

        Plan(String source, int count, boolean probe, double loss) {
            this.source = source;
            this.count = count;
            this.probe = probe;
            this.loss = loss;
        }
    }

    /** A round as it went. agreed: source -> how many of its drafts stand in the text, of how many put to the test. */
    static final class Trial {
        Plan plan;
        int drafted;
        int accepted;
        int tokens;
        double draftS;
        double verifyS;
        final Map<String, int[]> agreed = new LinkedHashMap<>();
    }

    /** The best number of drafts above 0. speedup: against plain decoding. */
    private static final class Forecast {
        String source;
        int count;
        double tokens;
        double seconds;
        double speedup;
    }

    private Map<Integer, Mean> rows = new LinkedHashMap<>(); // T of a verify -> seconds
    private final Map<String, Mean> drafts = new LinkedHashMap<>(); // source -> seconds per draft
    private Map<String, List<Mean>> chances = new LinkedHashMap<>(); // source -> share accepted at place 1, 2, ..
    private double credit = CREDIT;
    private double guard = GUARD;
    private int sinceProbe;

    /** Seconds of 1..MAX_DRAFT_TOKENS + 1 rows: a line through what was measured, drawn to each mean by its weight. */
    private static double[] verifySeconds(Map<Integer, Mean> rows) {
        double weight = 0;
        double center = 0;
        double level = 0;
        int widest = 0;
        for (Map.Entry<Integer, Mean> entry : rows.entrySet()) {
            Mean mean = entry.getValue();
            weight += mean.weight;
            center += mean.weight * entry.getKey();
            level += mean.weight * mean.value;
            widest = mean.weight > STALE ? Math.max(widest, entry.getKey()) : widest;
        }
        center /= weight;
        level /= weight;
        double spread = 0;
        double slope = 0;
        for (Map.Entry<Integer, Mean> entry : rows.entrySet()) {
            double off = entry.getKey() - center;
            spread += entry.getValue().weight * (off * off);
            slope += entry.getValue().weight * off * (entry.getValue().value - level);
        }
        double one = rows.containsKey(1) ? rows.get(1).value : level / (1 + ROW_SHARE * (center - 1));
        slope = (slope + ROW_SHARE * one) / (spread + 1);
        double[] seconds = new double[MAX_DRAFT_TOKENS + 1];
        for (int r = 1; r <= seconds.length; r++) {
            double line = level + slope * (Math.min(r, widest) - center + OUTER * Math.max(r - widest, 0));
            Mean mean = rows.get(r);
            if (mean != null) {
                line += mean.weight / (mean.weight + 1) * (mean.value - line);
            }
            seconds[r - 1] = Math.max(line, r > 1 ? seconds[r - 2] : 0);
        }
        return seconds;
    }

    /** Tokens of a round with 0..limit drafts. */
    private static double[] expectedTokens(List<Mean> chances, int limit) {
        double[] tokens = new double[limit + 1];
        tokens[0] = 1;
        double reached = 1;
        double usual = FIRST_CHANCE;
        for (int place = 0; place < limit; place++) {
            Mean mean = chances != null && place < chances.size() ? chances.get(place) : new Mean(0, 0);
            double chance = (mean.value * mean.weight + usual) / (mean.weight + 1);
            reached *= chance;
            tokens[place + 1] = tokens[place] + reached;
            usual = NEXT_SHARE * chance;
        }
        return tokens;
    }

    /** offers: source -> most drafts, at least 1. Null before a round was measured or without offers. */
    private Forecast forecast(Map<String, Integer> offers) {
        if (rows.isEmpty() || offers.isEmpty()) {
            return null;
        }
        double[] verify = verifySeconds(rows);
        Forecast best = null;
        for (Map.Entry<String, Integer> offer : offers.entrySet()) {
            Mean measured = drafts.get(offer.getKey());
            double step = measured != null && measured.weight > 0 ? measured.value : DRAFT_SHARE * verify[0];
            double[] tokens = expectedTokens(chances.get(offer.getKey()), offer.getValue());
            for (int count = 1; count < tokens.length; count++) {
                double seconds = verify[count] + count * step;
                double speedup = tokens[count] * verify[0] / seconds;
                if (best == null || speedup > best.speedup) {
                    best = new Forecast();
                    best.source = offer.getKey();
                    best.count = count;
                    best.tokens = tokens[count];
                    best.seconds = seconds;
                    best.speedup = speedup;
                }
            }
        }
        return best;
    }

    /** What to draft next; offers as for `forecast`. One row is measured first. */
    Plan decide(Map<String, Integer> offers) {
        Forecast best = forecast(offers);
        if (best == null || !rows.containsKey(1)) {
            return Plan.PLAIN;
        }
        boolean pays = best.speedup > 1 && guard > 0;
        Plan planned = pays ? new Plan(best.source, best.count, false, 0) : Plan.PLAIN;
        if (sinceProbe < PROBE_GAP || !(pays || guard > 0)) {
            return planned;
        }
        Mean one = rows.get(1);
        if (pays) {
            double loss = 1 - 1 / best.speedup; // of a plain round among drafted ones
            return credit >= loss || one.weight < 1 ? new Plan(null, 0, true, loss) : planned;
        }
        double loss = best.seconds / one.value - best.tokens;
        return loss <= Math.min(credit, guard) ? new Plan(best.source, best.count, true, loss) : planned;
    }

    void learn(Trial trial) {
        rows = learnRows(rows, trial.drafted + 1, trial.verifyS);
        if (trial.drafted > 0) {
            drafts.put(trial.plan.source, learnDraft(drafts.get(trial.plan.source), trial));
        }
        Map<String, List<Mean>> before = chances;
        chances = new LinkedHashMap<>();
        for (Map.Entry<String, List<Mean>> entry : before.entrySet()) {
            chances.put(entry.getKey(), fade(entry.getValue(), CHANCE_KEPT_IDLE));
        }
        for (Map.Entry<String, int[]> entry : trial.agreed.entrySet()) {
            List<Mean> places = before.get(entry.getKey());
            chances.put(entry.getKey(), learnPlaces(places, entry.getValue()[0], entry.getValue()[1]));
        }
        double[] usual = verifySeconds(rows);
        double plain = rows.containsKey(1) ? rows.get(1).value : usual[0];
        double spent = (Math.min(trial.verifyS, LOSS_CLIP * usual[trial.drafted]) + trial.draftS) / plain;
        double gain = trial.drafted > 0 ? trial.tokens - spent : 0;
        double paid = !trial.plan.probe ? 0 : trial.drafted > 0 ? gain : -trial.plan.loss;
        credit = Math.min(credit + PROBE_SHARE * spent + paid, MAX_CREDIT);
        guard = Math.min(guard + PROBE_SHARE * spent + gain, MAX_GUARD);
        sinceProbe = trial.plan.probe ? 0 : sinceProbe + 1;
    }

    private static Map<Integer, Mean> learnRows(Map<Integer, Mean> rows, int count, double seconds) {
        double expected = rows.isEmpty() ? seconds : verifySeconds(rows)[count - 1];
        double factor = Math.min(Math.max(seconds / expected, 1 / TIME_CLIP), TIME_CLIP);
        double shared = Math.pow(factor, TIME_SHARED);
        Map<Integer, Mean> after = new LinkedHashMap<>();
        for (Map.Entry<Integer, Mean> entry : rows.entrySet()) {
            after.put(entry.getKey(), new Mean(entry.getValue().value * shared, entry.getValue().weight * TIME_KEPT));
        }
        Mean old = after.containsKey(count) ? after.get(count) : new Mean(expected, 0);
        after.put(count, old.towards(expected * factor, TIME_WEIGHT));
        return after;
    }

    /** A source's first draft only warms it up. */
    private static Mean learnDraft(Mean mean, Trial trial) {
        double step = trial.draftS / trial.drafted;
        if (mean == null || mean.weight == 0) {
            return new Mean(step, mean == null ? 0 : 1);
        }
        return mean.towards(Math.min(step, TIME_CLIP * mean.value), TIME_WEIGHT);
    }

    private static List<Mean> learnPlaces(List<Mean> places, int hits, int tried) {
        List<Mean> after = places == null ? new ArrayList<Mean>() : fade(places, CHANCE_KEPT);
        while (after.size() < tried) {
            after.add(new Mean(0, 0));
        }
        for (int i = 0; i < tried; i++) {
            after.set(i, after.get(i).towards(i < hits ? 1 : 0, Double.POSITIVE_INFINITY));
        }
        return after;
    }

    private static List<Mean> fade(List<Mean> places, double kept) {
        List<Mean> after = new ArrayList<>();
        for (Mean mean : places) {
            after.add(new Mean(mean.value, mean.weight * kept));
        }
        return after;
    }

    /** Why nothing of `source` is drafted now; null where it is, or nothing was measured. */
    public String explain(String source) {
        Map<String, Integer> offers = new LinkedHashMap<>();
        offers.put(source, MAX_DRAFT_TOKENS);
        Forecast best = forecast(offers);
        if (best == null || (best.speedup > 1 && guard > 0)) {
            return null;
        }
        double[] verify = verifySeconds(rows);
        String means = String.format(Locale.ROOT, "verify of %d rows costs %.1fx, acceptance %.2f", best.count + 1,
            verify[best.count] / verify[0], (best.tokens - 1) / best.count);
        String speedup = String.format(Locale.ROOT, "%.2fx of plain", best.speedup);
        if (best.speedup > 1) {
            return "drafting pauses: its last rounds took longer than plain decoding would have, against its means ("
                + means + ": " + speedup + "); other programs may keep the machine busy";
        }
        return "drafting does not pay: " + means + ", expected " + speedup;
    }
}
