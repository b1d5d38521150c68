package gemma4.mtp.app;

import android.content.Context;
import android.content.SharedPreferences;
import gemma4.mtp.Costs;
import gemma4.mtp.Cpus;
import gemma4.mtp.DraftPolicy;
import gemma4.mtp.Sampling;
import gemma4.mtp.Specs.SamplingSpec;
import java.util.Map;

/** What the user chose; what was not chosen is the bundle's. */
final class Settings {
    static final int AUTO = -1;
    static final int MAX_THREADS = 32;
    static final int DEFAULT_CONTEXT = 4096;

    private final SharedPreferences stored;

    Settings(Context context) {
        stored = context.getSharedPreferences("settings", Context.MODE_PRIVATE);
    }

    /** AUTO, or a number of drafts. */
    int draftTokens() {
        return stored.getInt("draft_tokens", AUTO);
    }

    DraftPolicy policy() {
        int count = draftTokens();
        return count == AUTO ? DraftPolicy.auto("mtp", "ngram") : DraftPolicy.fixed(count, "constant", "mtp");
    }

    Sampling sampling(SamplingSpec defaults, long seed) {
        double temperature = number("temperature", defaults.doSample ? defaults.temperature : 0);
        int topK = (int) number("top_k", defaults.topK);
        return new Sampling(temperature != 0, temperature, topK, number("top_p", defaults.topP), 0, 1, seed);
    }

    int threads() {
        return (int) number("threads", Cpus.defaultThreads(Cpus.SYSFS, Runtime.getRuntime().availableProcessors()));
    }

    int context(int most) {
        return Math.min(most, (int) number("context", DEFAULT_CONTEXT));
    }

    /** As the user wrote it, or nothing. */
    String written(String name) {
        return stored.getString(name, "");
    }

    private double number(String name, double usual) {
        String text = written(name);
        return text.isEmpty() ? usual : Double.parseDouble(text);
    }

    /** values: name -> a number as text, or nothing for the bundle's own. */
    void save(int draftTokens, Map<String, String> values) {
        SharedPreferences.Editor editor = stored.edit();
        editor.putInt("draft_tokens", Math.max(AUTO, Math.min(draftTokens, Costs.MAX_DRAFT_TOKENS)));
        for (Map.Entry<String, String> value : values.entrySet()) {
            editor.putString(value.getKey(), value.getValue());
        }
        editor.apply();
    }

    String bundle() {
        return stored.getString("bundle", "");
    }

    void setBundle(String path) {
        stored.edit().putString("bundle", path).apply();
    }
}
