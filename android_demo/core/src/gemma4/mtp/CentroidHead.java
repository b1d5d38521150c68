package gemma4.mtp;

import gemma4.mtp.Specs.CentroidHeadSpec;
import java.io.File;

/** The drafter's head: the best topK clusters of C, then the rows of their V/C tokens each. Never vocabulary-wide. */
final class CentroidHead {
    private final int topK;
    private final int clusterSize;
    private final float[][] centroids; // [C][h], read whole at every step
    private final MappedArray ids;
    private final EmbeddingTable table;
    private final CentroidHeadSpec spec;

    CentroidHead(File bundle, CentroidHeadSpec spec) {
        this.spec = spec;
        topK = (int) spec.topK;
        ids = new MappedArray(bundle, spec.tokenOrdering);
        clusterSize = ids.columns;
        table = new EmbeddingTable(bundle, spec.table);
        MappedArray mapped = new MappedArray(bundle, spec.centroids);
        centroids = new float[mapped.rows][mapped.columns];
        for (int i = 0; i < centroids.length; i++) {
            mapped.read(i, centroids[i]);
        }
    }

    /**
     * hidden [h] -> the token with the largest logit. Sums are in double: they may differ from another host's in the
     * last bits of a float32, which only a tie of two drafts can show, and the text never.
     */
    int token(float[] hidden) {
        float[] values = new float[table.stored()];
        float[] scales = new float[table.blocks()];
        int best = -1;
        float largest = Float.NEGATIVE_INFINITY;
        for (int cluster : bestClusters(hidden)) {
            for (int i = 0; i < clusterSize; i++) {
                int row = cluster * clusterSize + i;
                table.values(row, values);
                table.scales(row, scales);
                float logit = (float) product(values, scales, hidden);
                if (best < 0 || logit > largest) {
                    best = ids.integer(cluster, i);
                    largest = logit;
                }
            }
        }
        return best;
    }

    private double product(float[] values, float[] scales, float[] hidden) {
        double total = 0;
        int block = (int) Math.min(spec.table.block, hidden.length);
        for (int group = 0, first = 0; first < hidden.length; group++, first += block) {
            double sum = 0;
            for (int i = first; i < Math.min(first + block, hidden.length); i++) {
                sum += (values[i] - spec.table.zeroPoint) * hidden[i];
            }
            total += sum * scales[Math.min(group, scales.length - 1)];
        }
        return total;
    }

    /** The topK with the largest scores, best first. */
    private int[] bestClusters(float[] hidden) {
        int[] best = new int[topK];
        double[] scores = new double[topK];
        int count = 0;
        for (int cluster = 0; cluster < centroids.length; cluster++) {
            double score = 0;
            for (int i = 0; i < hidden.length; i++) {
                score += (double) centroids[cluster][i] * hidden[i];
            }
            int place = count;
            while (place > 0 && score > scores[place - 1]) {
                place--;
            }
            if (place == topK) {
                continue;
            }
            count = Math.min(count + 1, topK);
            System.arraycopy(best, place, best, place + 1, count - place - 1);
            System.arraycopy(scores, place, scores, place + 1, count - place - 1);
            best[place] = cluster;
            scores[place] = score;
        }
        return best;
    }
}
