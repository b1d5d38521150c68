package gemma4.mtp;

import gemma4.mtp.Specs.ArraySpec;
import gemma4.mtp.Specs.BackendSpec;
import gemma4.mtp.Specs.CentroidHeadSpec;
import gemma4.mtp.Specs.GraphSpec;
import gemma4.mtp.Specs.KVLayerSpec;
import gemma4.mtp.Specs.TableSpec;
import gemma4.mtp.Specs.TensorSpec;
import java.math.BigInteger;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeSet;

/**
 * What the types of a manifest cannot say: names that must exist, paths that must stay inside the bundle, sizes that
 * agree; the rules and sentences of runtime_py/manifest.py, in its order.
 */
final class ManifestRules {
    private static final String[] GRAPHS = {"self_decoder", "cross_decoder", "drafter"};

    private ManifestRules() {}

    static void check(Manifest manifest) {
        TreeSet<String> found = new TreeSet<>(manifest.graphs.keySet());
        if (!found.equals(new TreeSet<>(Arrays.asList(GRAPHS)))) {
            String got = found.isEmpty() ? "none" : join(found);
            throw new ValueError("graphs: expected " + join(Arrays.asList(GRAPHS)) + ", got " + got);
        }
        for (String name : manifest.files.keySet()) {
            if (name.startsWith("/") || Arrays.asList(name.split("/")).contains("..")) {
                throw new ValueError("files: " + Json.repr(name) + " leads out of the bundle");
            }
        }
        requireFile(manifest, "tokenizer.json", "text");
        for (Map.Entry<String, GraphSpec> graph : manifest.graphs.entrySet()) {
            for (String path : graph.getValue().files.values()) {
                requireFile(manifest, path, "graphs." + graph.getKey() + ".files");
            }
        }
        for (Map.Entry<String, ArraySpec> array : arrays(manifest).entrySet()) {
            checkArray(manifest, array.getValue(), array.getKey());
        }
        checkBackends(manifest);
        BigInteger width = times(manifest.target.numLayers, manifest.target.perLayerInputSize);
        checkTable(manifest.target.perLayerTable, width, "target.per_layer_table");
        checkKv(manifest);
        checkNumbers(manifest);
    }

    private static void checkBackends(Manifest manifest) {
        if (manifest.backends.isEmpty()) {
            throw new ValueError("backends: none; the bundle cannot run");
        }
        for (Map.Entry<String, BackendSpec> entry : manifest.backends.entrySet()) {
            String where = "backends." + entry.getKey();
            BigInteger hidden = BigInteger.valueOf(manifest.target.hiddenSize);
            checkTable(entry.getValue().tokenTable, hidden, where + ".token_table");
            for (Map.Entry<String, GraphSpec> graph : manifest.graphs.entrySet()) {
                if (!graph.getValue().files.containsKey(entry.getKey())) {
                    throw new ValueError(where + ": graph " + graph.getKey() + " has no file for it");
                }
            }
            boolean good = entry.getValue().loadedBytes.keySet().equals(manifest.graphs.keySet());
            for (long bytes : entry.getValue().loadedBytes.values()) {
                good &= bytes >= 0;
            }
            if (!good) {
                throw new ValueError(where + ".loaded_bytes: expected bytes of " + join(Arrays.asList(GRAPHS)));
            }
        }
    }

    private static void requireFile(Manifest manifest, String name, String where) {
        if (!manifest.files.containsKey(name)) {
            throw new ValueError(where + ": " + Json.repr(name) + " is not listed in files");
        }
    }

    private static Map<String, TableSpec> tables(Manifest manifest) {
        Map<String, TableSpec> tables = new LinkedHashMap<>();
        for (Map.Entry<String, BackendSpec> entry : manifest.backends.entrySet()) {
            tables.put("backends." + entry.getKey() + ".token_table", entry.getValue().tokenTable);
        }
        tables.put("target.per_layer_table", manifest.target.perLayerTable);
        if (manifest.drafter.centroidHead != null) {
            tables.put("drafter.centroid_head.table", manifest.drafter.centroidHead.table);
        }
        return tables;
    }

    private static Map<String, ArraySpec> arrays(Manifest manifest) {
        Map<String, ArraySpec> arrays = new LinkedHashMap<>();
        for (Map.Entry<String, TableSpec> table : tables(manifest).entrySet()) {
            arrays.put(table.getKey() + ".data", table.getValue().data);
            if (table.getValue().scales != null) {
                arrays.put(table.getKey() + ".scales", table.getValue().scales);
            }
        }
        CentroidHeadSpec head = manifest.drafter.centroidHead;
        if (head != null) {
            arrays.put("drafter.centroid_head.centroids", head.centroids);
            arrays.put("drafter.centroid_head.token_ordering", head.tokenOrdering);
        }
        return arrays;
    }

    private static void checkArray(Manifest manifest, ArraySpec array, String where) {
        requireFile(manifest, array.file, where);
        if (!Manifest.dtypes().containsKey(array.dtype)) {
            String all = join(Manifest.dtypes().keySet());
            throw new ValueError(where + ": dtype " + Json.repr(array.dtype) + " is none of " + all);
        }
        if (array.shape.length != 2 || array.shape[0] < 1 || array.shape[1] < 1 || array.offsetBytes < 0) {
            throw new ValueError(where + ": shape " + tuple(array.shape) + " at offset " + array.offsetBytes
                + " is no matrix in a file");
        }
        BigInteger end = array.sizeBytes().add(BigInteger.valueOf(array.offsetBytes));
        long size = manifest.files.get(array.file).sizeBytes;
        if (end.compareTo(BigInteger.valueOf(size)) > 0) {
            throw new ValueError(where + ": ends at byte " + end + ", " + array.file + " has " + size);
        }
    }

    private static void checkTable(TableSpec table, BigInteger columns, String where) {
        String dtype = table.data.dtype;
        boolean fits = table.bits == 4 ? dtype.equals("uint8")
            : table.bits == 8          ? dtype.equals("int8") || dtype.equals("uint8")
                                       : table.bits == 32 && dtype.equals("float32");
        if (!fits) {
            throw new ValueError(where + ": " + table.bits + " bits and dtype " + dtype + " do not go together");
        }
        String scales = table.scales == null ? "float32" : table.scales.dtype;
        if (!scales.equals("bfloat16") && !scales.equals("float32")) {
            throw new ValueError(where + ".scales: dtype " + Json.repr(scales) + " is none of bfloat16, float32");
        }
        long least = dtype.equals("int8") ? -128 : 0;
        long most = dtype.equals("int8") ? 127 : table.bits == 4 ? 15 : 255;
        if (table.zeroPoint < least || table.zeroPoint > most) {
            throw new ValueError(where + ".zero_point: " + table.zeroPoint + " is outside " + least + ".." + most
                + ", what its values can be");
        }
        long stored = table.data.shape[1] * (table.bits == 4 ? 2 : 1);
        if (!BigInteger.valueOf(table.columns).equals(columns) || stored < table.columns) {
            throw new ValueError(
                where + ": has " + table.columns + " columns of " + stored + " stored, expected " + columns);
        }
        if (table.block < 1 || (table.scales == null) != (table.bits == 32)) {
            throw new ValueError(
                where + ": block " + table.block + ", " + table.bits + " bits and scales do not go together");
        }
        if (table.scales != null) {
            long[] want = {
                table.data.shape[0], table.columns / table.block + (table.columns % table.block > 0 ? 1 : 0)};
            if (!Arrays.equals(table.scales.shape, want)) {
                throw new ValueError(where + ": scales " + tuple(table.scales.shape) + " do not fit rows of " + columns
                    + " in blocks of " + table.block);
            }
        }
    }

    private static void checkKv(Manifest manifest) {
        checkDtype("kv", manifest.kv.dtype);
        for (GraphSpec graph : manifest.graphs.values()) {
            for (TensorSpec spec : graph.inputs) {
                checkDtype(spec.name, spec.dtype);
            }
            for (TensorSpec spec : graph.outputs) {
                checkDtype(spec.name, spec.dtype);
            }
        }
        Map<Long, KVLayerSpec> layers = new LinkedHashMap<>();
        StringBuilder indices = new StringBuilder();
        boolean inOrder = true;
        for (KVLayerSpec layer : manifest.kv.layers) {
            indices.append(indices.length() > 0 ? ", " : "").append(layer.layer);
            inOrder &= layer.layer == layers.size();
            layers.put(layer.layer, layer);
        }
        long own = manifest.target.numOwnKvLayers;
        if (!inOrder || manifest.kv.layers.size() != own) {
            throw new ValueError("kv.layers: expected layers 0.." + (own - 1) + " in order, got [" + indices + "]");
        }
        for (String kind : Manifest.KINDS) {
            Long index = manifest.kv.donors.get(kind);
            KVLayerSpec donor = index == null ? null : layers.get(index);
            if (donor == null || !donor.type.equals(kind)) {
                throw new ValueError(
                    "kv.donors." + kind + ": " + Json.repr(index) + " is no " + kind + " layer with its own KV");
            }
            checkFrequencies("target", manifest.target.invFreq.get(kind), kind, donor);
            checkFrequencies("drafter", manifest.drafter.invFreq.get(kind), kind, donor);
        }
    }

    private static void checkDtype(String where, String dtype) {
        if (Manifest.kvParts(dtype) == null) {
            throw new ValueError(where + ": dtype " + Json.repr(dtype) + " is none of float32, float16, int8");
        }
    }

    private static void checkFrequencies(String who, float[] values, String kind, KVLayerSpec donor) {
        int count = values == null ? 0 : values.length;
        if (count * 2 != donor.headDim) {
            throw new ValueError(who + ".inv_freq." + kind + ": " + count + " values, head_dim " + donor.headDim);
        }
    }

    private static void checkNumbers(Manifest manifest) {
        long vocab = manifest.target.vocabSize;
        atLeastOne("target.vocab_size", vocab);
        atLeastOne("target.query_heads", manifest.target.queryHeads);
        atLeastOne("target.max_context_tokens", manifest.target.maxContextTokens);
        atLeastOne("kv.chunk_rows", manifest.kv.chunkRows);
        atLeastOne("kv.window", manifest.kv.window);
        atLeastOne("drafter.num_draft_tokens", manifest.drafter.numDraftTokens);
        for (KVLayerSpec entry : manifest.kv.layers) {
            atLeastOne("kv.layers[" + entry.layer + "].kv_heads", entry.kvHeads);
            atLeastOne("kv.layers[" + entry.layer + "].head_dim", entry.headDim);
        }
        for (Map.Entry<String, TableSpec> table : tables(manifest).entrySet()) {
            long rows = table.getValue().data.shape[0];
            if (!table.getKey().equals("drafter.centroid_head.table") && rows != vocab) {
                throw new ValueError(table.getKey() + ": has " + rows + " rows, vocab_size is " + vocab);
            }
        }
        for (Map.Entry<String, BackendSpec> backend : manifest.backends.entrySet()) {
            long tokens = backend.getValue().maxContextTokens;
            if (tokens < 1 || tokens > manifest.target.maxContextTokens) {
                throw new ValueError("backends." + backend.getKey() + ".max_context_tokens: " + tokens
                    + " is outside 1.." + manifest.target.maxContextTokens);
            }
        }
        String schedule = manifest.drafter.schedule;
        if (!schedule.equals("constant") && !schedule.equals("heuristic")) {
            throw new ValueError("drafter.schedule: " + Json.repr(schedule) + " is neither constant nor heuristic");
        }
        checkToken("bos", manifest.tokens.bos, vocab);
        checkToken("pad", manifest.tokens.pad, vocab);
        for (long token : manifest.tokens.eos) {
            checkToken("eos", token, vocab);
        }
        if (manifest.drafter.centroidHead != null) {
            checkHead(manifest, manifest.drafter.centroidHead);
        } else if (!givesLogits(manifest.graphs.get("drafter"))) {
            throw new ValueError("drafter.centroid_head: none, and the drafter's graph gives no logits");
        }
    }

    private static void checkHead(Manifest manifest, CentroidHeadSpec head) {
        checkHeadDtype("centroids", head.centroids.dtype, "float32");
        checkHeadDtype("token_ordering", head.tokenOrdering.dtype, "int32");
        long clusters = head.tokenOrdering.shape[0];
        long rows = head.tokenOrdering.shape[1];
        long[] centroids = {clusters, manifest.drafter.hiddenSize};
        if (clusters * rows != manifest.target.vocabSize || !Arrays.equals(head.centroids.shape, centroids)) {
            throw new ValueError("drafter.centroid_head: " + clusters + " x " + rows
                + " tokens do not make a vocabulary of " + manifest.target.vocabSize);
        }
        if (head.topK < 1 || head.topK > clusters) {
            throw new ValueError("drafter.centroid_head.top_k: " + head.topK + " of " + clusters + " centroids");
        }
        checkTable(head.table, BigInteger.valueOf(manifest.drafter.hiddenSize), "drafter.centroid_head.table");
    }

    private static void checkHeadDtype(String name, String dtype, String expected) {
        if (!dtype.equals(expected)) {
            throw new ValueError(
                "drafter.centroid_head." + name + ": dtype " + Json.repr(dtype) + " is not " + expected);
        }
    }

    private static boolean givesLogits(GraphSpec drafter) {
        for (TensorSpec output : drafter.outputs) {
            if (output.name.equals("logits")) {
                return true;
            }
        }
        return false;
    }

    private static void atLeastOne(String where, long value) {
        if (value < 1) {
            throw new ValueError(where + ": must be at least 1, got " + value);
        }
    }

    private static void checkToken(String where, long token, long vocab) {
        if (token < 0 || token >= vocab) {
            throw new ValueError("tokens." + where + ": " + token + " is outside 0.." + (vocab - 1));
        }
    }

    private static BigInteger times(long a, long b) {
        return BigInteger.valueOf(a).multiply(BigInteger.valueOf(b));
    }

    static String join(Iterable<String> words) {
        StringBuilder text = new StringBuilder();
        for (String word : words) {
            text.append(text.length() > 0 ? ", " : "").append(word);
        }
        return text.toString();
    }

    /** As Python writes a tuple. */
    private static String tuple(long[] values) {
        String inner = Arrays.toString(values);
        return "(" + inner.substring(1, inner.length() - 1) + (values.length == 1 ? ",)" : ")");
    }
}
