package gemma4.mtp;

import gemma4.mtp.Specs.SamplingSpec;

/**
 * Names as in Transformers' GenerationConfig. topK 0, topP 1, minP 0 and repetitionPenalty 1 are off, temperature 0 is
 * greedy. seed: all 64 bits, unsigned.
 */
public final class Sampling {
    /** Of the repetition penalty: a float logit divided by less, or multiplied by more than MOST, may overflow. */
    private static final double LEAST = 1e-30;
    private static final double MOST = 1e30;

    public static final Sampling GREEDY = new Sampling(false, 1, 0, 1, 0, 1, 0);

    public final boolean doSample;
    public final double temperature;
    public final int topK;
    public final double topP;
    public final double minP;
    public final double repetitionPenalty;
    public final long seed;

    /** ValueError names a value that cannot be. */
    public Sampling(
        boolean doSample, double temperature, int topK, double topP, double minP, double repetitionPenalty, long seed) {
        check("temperature", temperature, 0 <= temperature && !Double.isInfinite(temperature),
            "it must be at least 0; 0 is greedy");
        check("top_k", (long) topK, topK >= 0, "it must be at least 0; 0 keeps every token");
        check("top_p", topP, 0 < topP && topP <= 1, "it must be above 0 and at most 1; 1 keeps every token");
        check("min_p", minP, 0 <= minP && minP <= 1, "it must be from 0 to 1; 0 keeps every token");
        check("repetition_penalty", repetitionPenalty, LEAST <= repetitionPenalty && repetitionPenalty <= MOST,
            "it must be above 0, from 1e-30 to 1e30; 1 is none");
        this.doSample = doSample;
        this.temperature = temperature;
        this.topK = topK;
        this.topP = topP;
        this.minP = minP;
        this.repetitionPenalty = repetitionPenalty;
        this.seed = seed;
    }

    /** The bundle's defaults. */
    public static Sampling defaults(SamplingSpec spec, long seed) {
        boolean samples = spec.doSample && spec.temperature != 0;
        return new Sampling(samples, spec.temperature, Numbers.toInt(spec.topK, "top_k"), spec.topP, 0, 1, seed);
    }

    public boolean greedy() {
        return !doSample || temperature == 0;
    }

    private static void check(String name, Object value, boolean good, String remedy) {
        if (!good) {
            throw new ValueError(name + " is " + Json.str(value) + "; " + remedy);
        }
    }
}
