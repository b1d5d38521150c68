package gemma4.mtp;

import java.util.Arrays;
import java.util.Comparator;

/**
 * Logits -> one token, greedy or sampled: the maths and the random stream of runtime_py/sampling.py, whose docstring
 * specifies both. The draw needs the seed and the token's position alone. Weights are in double by StrictMath, alike on
 * every device; another host's exponential may differ in a last bit, which moves the bounds between tokens by some
 * 1e-16.
 */
public final class Sampler {
    private static final int FEW = 256; // largest top_k that is found without sorting all logits

    private final Sampling sampling;
    private final boolean[] seen;
    private int covered; // ids that `seen` knows

    /** Of one text, which only grows between calls. */
    public Sampler(Sampling sampling, int vocabSize) {
        this.sampling = sampling;
        seen = sampling.repetitionPenalty == 1 ? null : new boolean[vocabSize];
    }

    /**
     * ids: the whole text before the token; logits [V] of its last token, which may be changed. ValueError if they
     * give no token.
     */
    public int choose(IntList ids, float[] logits) {
        if (seen != null) {
            for (; covered < ids.size(); covered++) {
                seen[ids.get(covered)] = true;
            }
            penalize(logits);
        }
        int best = Numbers.argmax(logits);
        if (Float.isNaN(logits[best]) || Float.isInfinite(logits[best])) {
            throw new ValueError("no token can be chosen at position " + ids.size() + ": the largest logit is "
                + Json.repr((double) logits[best]) + "; the bundle's weights are damaged");
        }
        if (sampling.greedy()) {
            return best;
        }
        Weighed kept = weigh(logits, sampling);
        return kept.draw(uniform(sampling.seed, ids.size()));
    }

    private void penalize(float[] logits) {
        float penalty = (float) sampling.repetitionPenalty;
        for (int i = 0; i < logits.length; i++) {
            if (seen[i]) {
                logits[i] = logits[i] < 0 ? logits[i] * penalty : logits[i] / penalty;
            }
        }
    }

    /** The ids that may be drawn, ascending, and their weights; the largest is 1. */
    static final class Weighed {
        final int[] ids;
        final double[] weights;

        Weighed(int[] ids, double[] weights) {
            this.ids = ids;
            this.weights = weights;
        }

        /** The token at u in [0, 1) of the cumulative distribution, added up one by one. */
        int draw(double u) {
            double sum = 0;
            for (double weight : weights) {
                sum += weight;
            }
            double place = u * sum;
            double running = 0;
            for (int i = 0; i < ids.length; i++) {
                running += weights[i];
                if (running > place) {
                    return ids[i];
                }
            }
            return ids[ids.length - 1];
        }

        Weighed keep(boolean[] kept) {
            int count = 0;
            for (boolean stays : kept) {
                count += stays ? 1 : 0;
            }
            int[] left = new int[count];
            double[] theirs = new double[count];
            for (int i = 0, at = 0; i < kept.length; i++) {
                if (kept[i]) {
                    left[at] = ids[i];
                    theirs[at++] = weights[i];
                }
            }
            return new Weighed(left, theirs);
        }
    }

    static Weighed weigh(float[] logits, Sampling sampling) {
        float least = 0 < sampling.topK && sampling.topK < logits.length ? largest(logits, sampling.topK)
                                                                         : Float.NEGATIVE_INFINITY;
        int count = 0;
        float most = Float.NEGATIVE_INFINITY;
        for (float logit : logits) {
            count += logit >= least ? 1 : 0; // ties stay
            most = Math.max(most, logit);
        }
        int[] ids = new int[count];
        double[] weights = new double[count];
        for (int i = 0, at = 0; i < logits.length; i++) {
            if (logits[i] >= least) {
                ids[at] = i;
                weights[at++] = StrictMath.exp(((double) logits[i] - most) / sampling.temperature);
            }
        }
        Weighed weighed = new Weighed(ids, weights);
        if (sampling.topP < 1) {
            weighed = weighed.keep(topP(weighed.weights, sampling.topP));
        }
        boolean[] kept = new boolean[weighed.ids.length];
        for (int i = 0; i < kept.length; i++) {
            kept[i] = weighed.weights[i] >= sampling.minP;
        }
        return weighed.keep(kept);
    }

    /** The k-th largest. */
    private static float largest(float[] values, int k) {
        if (k > FEW) {
            float[] sorted = values.clone();
            Arrays.sort(sorted);
            return sorted[sorted.length - k];
        }
        float[] best = new float[k];
        Arrays.fill(best, Float.NEGATIVE_INFINITY);
        for (float value : values) {
            if (value > best[k - 1]) {
                int place = k - 1;
                for (; place > 0 && value > best[place - 1]; place--) {
                    best[place] = best[place - 1];
                }
                best[place] = value;
            }
        }
        return best[k - 1];
    }

    /**
     * The tokens that stay: all but those that, with every smaller one, have at most 1 - topP of the probability; of
     * equal tokens the lower ids go first, one token always stays.
     */
    private static boolean[] topP(final double[] weights, double topP) {
        double sum = 0;
        for (double weight : weights) {
            sum += weight;
        }
        double tail = (1 - topP) * sum;
        boolean[] kept = new boolean[weights.length];
        Integer[] order = new Integer[weights.length];
        int count = 0;
        double removed = 0;
        for (int i = 0; i < weights.length; i++) {
            if (weights[i] * weights.length
                >= tail) { // all the others together are within the tail, and need no sorting
                order[count++] = i;
            } else {
                removed += weights[i];
            }
        }
        Arrays.sort(order, 0, count, new Comparator<Integer>() {
            @Override
            public int compare(Integer a, Integer b) {
                return Double.compare(weights[a], weights[b]);
            }
        });
        double running = 0;
        for (int i = 0; i < count; i++) {
            running += weights[order[i]];
            kept[order[i]] = i == count - 1 || removed + running > tail;
        }
        return kept;
    }

    /** Output number `position` of SplitMix64(seed) as a double in [0, 1) with 53 bits. */
    static double uniform(long seed, int position) {
        long z = seed + (position + 1L) * 0x9E3779B97F4A7C15L;
        z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9L;
        z = (z ^ z >>> 27) * 0x94D049BB133111EBL;
        return ((z ^ z >>> 31) >>> 11) * 0x1p-53;
    }
}
