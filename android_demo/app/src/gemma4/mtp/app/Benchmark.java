package gemma4.mtp.app;

import android.content.res.Resources;
import gemma4.mtp.Session;
import gemma4.mtp.Stats;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;

/** Runs of one text without and with drafts: medians, lowest and highest. */
final class Benchmark {
    private final Resources texts;
    private final List<Double> plain = new ArrayList<>();
    private final List<Double> drafted = new ArrayList<>();
    private final int[][] counts = new int[2][2]; // plain, drafted: accepted, drafted
    private int[] first;
    private boolean same = true;

    Benchmark(Resources texts) {
        this.texts = texts;
    }

    void add(boolean isPlain, Session.Reply reply) {
        (isPlain ? plain : drafted).add(reply.tokensPerSecond());
        Stats stats = new Stats(reply.rounds);
        counts[isPlain ? 0 : 1][0] += stats.accepted;
        counts[isPlain ? 0 : 1][1] += stats.drafted;
        first = first == null ? reply.tokenIds : first;
        same &= Arrays.equals(first, reply.tokenIds);
    }

    String lines() {
        String lines = line(R.string.plain, plain, counts[0]);
        if (drafted.isEmpty()) {
            return lines;
        }
        lines += "\n" + line(R.string.drafted, drafted, counts[1]);
        lines += "\n" + texts.getString(R.string.speedup, median(drafted) / median(plain));
        return lines + "\n" + texts.getString(same ? R.string.same_text : R.string.other_text);
    }

    private String line(int name, List<Double> rates, int[] count) {
        return texts.getString(R.string.benchmark_line, texts.getString(name), median(rates), Collections.min(rates),
            Collections.max(rates), count[0], count[1]);
    }

    private static double median(List<Double> rates) {
        List<Double> sorted = new ArrayList<>(rates);
        Collections.sort(sorted);
        int middle = sorted.size() / 2;
        return sorted.size() % 2 == 1 ? sorted.get(middle) : (sorted.get(middle - 1) + sorted.get(middle)) / 2;
    }
}
