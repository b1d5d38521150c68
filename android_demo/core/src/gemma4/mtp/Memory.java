package gemma4.mtp;

import gemma4.mtp.Specs.KVLayerSpec;
import gemma4.mtp.Specs.KVSpec;
import java.io.BufferedReader;
import java.io.FileReader;
import java.io.IOException;
import java.util.Locale;
import java.util.Map;

/**
 * Whether a bundle fits into memory, told before it is loaded: the estimate of runtime_py/memory.py. Embedding tables
 * are left out: they are mapped, and only rows in use become resident.
 */
public final class Memory {
    public final long weightsBytes;
    public final long drafterBytes;
    public final long kvBytes;
    private final int contextTokens;

    /**
     * contextTokens, marginRows as for KvCache; drafts: whether the bundle's drafter is loaded. ValueError if the
     * bundle has no graphs for Pair.BACKEND.
     */
    public Memory(Manifest manifest, int contextTokens, int marginRows, boolean drafts) {
        Map<String, Long> loaded = Pair.backend(manifest).loadedBytes;
        weightsBytes = loaded.get("self_decoder") + loaded.get("cross_decoder");
        long drafter = loaded.get("drafter");
        if (manifest.drafter.centroidHead != null) {
            drafter += manifest.drafter.centroidHead.centroids.sizeBytes().longValue();
        }
        drafterBytes = drafts ? drafter : 0;
        kvBytes = (long) (cacheBytes(manifest.kv, contextTokens, marginRows) + castBytes(manifest.kv, contextTokens));
        this.contextTokens = contextTokens;
    }

    public long totalBytes() {
        return (long) ((double) weightsBytes + drafterBytes + kvBytes);
    }

    /** The parts, in a sentence. */
    public String describe() {
        String drafter = drafterBytes > 0 ? " + drafter " + megabytes(drafterBytes) : "";
        return "weights " + megabytes(weightsBytes) + drafter + " + KV " + megabytes(kvBytes) + " (" + contextTokens
            + " tokens)";
    }

    public static String megabytes(long bytes) {
        return String.format(Locale.ROOT, "%.1f MB", bytes / 1e6);
    }

    /** Of this process now, mapped files included; 0 where the system does not tell. */
    public static long residentBytes() {
        try (BufferedReader reader = new BufferedReader(new FileReader("/proc/self/status"))) {
            for (String line = reader.readLine(); line != null; line = reader.readLine()) {
                if (line.startsWith("VmRSS:")) {
                    return 1024 * Long.parseLong(line.replaceAll("[^0-9]", ""));
                }
            }
        } catch (IOException error) {
            return 0;
        }
        return 0;
    }

    /**
     * Keys and values of a KvCache whose context is full. A double, which is exact here and does not overflow, whatever
     * a manifest says.
     */
    private static double cacheBytes(KVSpec spec, int contextTokens, int marginRows) {
        double whole = Math.ceil(contextTokens / (double) spec.chunkRows) * spec.chunkRows;
        double closed = marginRows > 0 ? (double) spec.window + marginRows : 0;
        double total = 0;
        for (KVLayerSpec layer : spec.layers) {
            boolean sliding = layer.type.equals(Manifest.SLIDING);
            double rows = sliding ? spec.window + closed : whole;
            rows += layer.layer == spec.donors.get(Manifest.SLIDING) ? spec.window : 0;
            total += spec.rowBytes(layer) * rows;
            if (sliding || !spec.dtype.equals("float32")) {
                total += 2.0 * 4 * layer.kvHeads * layer.headDim * spec.chunkRows;
            }
        }
        return total;
    }

    /** What a step takes for past rows narrower than float32: keys and values of one full layer at a time, cast. */
    private static double castBytes(KVSpec spec, int contextTokens) {
        double most = 0;
        for (KVLayerSpec layer : spec.layers) {
            if (!spec.dtype.equals("float32") && layer.type.equals(Manifest.FULL)) {
                most = Math.max(most, 2.0 * 4 * layer.kvHeads * layer.headDim);
            }
        }
        return most * contextTokens;
    }
}
