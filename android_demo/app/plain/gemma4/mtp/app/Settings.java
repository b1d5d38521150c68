package gemma4.mtp.app;

import gemma4.mtp.Costs;
import gemma4.mtp.Cpus;
import gemma4.mtp.DraftPolicy;
import gemma4.mtp.Sampling;
import gemma4.mtp.Specs.SamplingSpec;
import gemma4.mtp.ValueError;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;

/** What a user has chosen. A field that is left empty means the bundle's own, or what is best here. */
public final class Settings {
    public static final String AUTO = "auto";
    public static final String FIXED = "fixed";
    public static final String OFF = "off";
    public static final List<String> DRAFTING = Collections.unmodifiableList(Arrays.asList(AUTO, FIXED, OFF));
    public static final int CONTEXT_TOKENS = 4096; // KV rows of E2B then take 67 MB
    static final int FIXED_TOKENS = 3;
    static final int MAX_THREADS = 256;

    /** One of DRAFTING. */
    public final String drafting;
    /** As many as threads() says where 0. */
    private final int threads;
    public final int contextTokens;
    private final int draftTokens;
    private final Double temperature;
    private final Integer topK;
    private final Double topP;

    /** fields: name -> text as it was written. ValueError names a field that cannot be. */
    public Settings(Map<String, String> fields) {
        String written = text(fields, "drafting");
        drafting = written.isEmpty() ? AUTO : written;
        if (!DRAFTING.contains(drafting)) {
            throw new ValueError("drafting is " + drafting + "; give one of " + DRAFTING);
        }
        draftTokens = integer(fields, "draft_tokens", 1, Costs.MAX_DRAFT_TOKENS, FIXED_TOKENS);
        temperature = number(fields, "temperature");
        topK = text(fields, "top_k").isEmpty() ? null : integer(fields, "top_k", 0, Integer.MAX_VALUE, 0);
        topP = number(fields, "top_p");
        threads = integer(fields, "threads", 1, MAX_THREADS, 0);
        contextTokens = integer(fields, "context", 2, Integer.MAX_VALUE, CONTEXT_TOKENS);
        new Sampling(true, temperature == null ? 1 : temperature, 0, topP == null ? 1 : topP, 0, 1, 0);
    }

    private static String text(Map<String, String> fields, String name) {
        String text = fields.get(name);
        return text == null ? "" : text.trim();
    }

    private static Double number(Map<String, String> fields, String name) {
        String text = text(fields, name).replace(',', '.');
        if (text.isEmpty()) {
            return null;
        }
        if (!text.matches("-?([0-9]+\\.?|[0-9]*\\.[0-9]+)([eE][+-]?[0-9]+)?")) { // Java's own also takes 1f and 0x1p1
            throw new ValueError(name + " is " + text + "; give a number, or nothing for the bundle's own");
        }
        return Double.valueOf(text);
    }

    private static int integer(Map<String, String> fields, String name, int least, int most, int usual) {
        String text = text(fields, name);
        if (text.isEmpty()) {
            return usual;
        }
        long value = text.matches("[0-9]{1,18}") ? Long.parseLong(text) : -1;
        if (value < least || value > most) {
            throw new ValueError(name + " is " + text + "; give a whole number from " + least + " to " + most);
        }
        return (int) value;
    }

    /** Chosen, or the usual number. */
    public int threads() {
        return threads > 0 ? threads : usualThreads();
    }

    /** The cores of this device without the slowest class. */
    static int usualThreads() {
        return Math.min(Cpus.defaultThreads(Cpus.SYSFS, Runtime.getRuntime().availableProcessors()), MAX_THREADS);
    }

    public Sampling sampling(SamplingSpec defaults, long seed) {
        double heat = temperature != null ? temperature : defaults.doSample ? defaults.temperature : 0;
        int few = topK != null ? topK : (int) Math.min(defaults.topK, Integer.MAX_VALUE);
        return new Sampling(heat != 0, heat, few, topP != null ? topP : defaults.topP, 0, 1, seed);
    }

    /** A new one, which has learned nothing. */
    DraftPolicy newPolicy() {
        if (drafting.equals(AUTO)) {
            return DraftPolicy.auto("mtp", "ngram");
        }
        return DraftPolicy.fixed(drafting.equals(OFF) ? 0 : draftTokens, "constant", "mtp");
    }

    /** Whether both draft alike, so that what was learned can be kept. */
    boolean draftsAs(Settings other) {
        return drafting.equals(other.drafting) && draftTokens == other.draftTokens;
    }
}
