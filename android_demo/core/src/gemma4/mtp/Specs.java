package gemma4.mtp;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The records of a manifest; runtime_py/manifest.py says what they mean. Strict: ValueErrors name the field. */
public final class Specs {
    private Specs() {}

    /** A graph input or output. shape: Long, or String for a size that calls choose. */
    public static final class TensorSpec {
        public final String name;
        public final List<Object> shape;
        public final String dtype;

        TensorSpec(Object value, String where) {
            Fields f = new Fields(value, where, "name", "shape", "dtype");
            name = f.string("name");
            shape = f.list("shape");
            for (int i = 0; i < shape.size(); i++) {
                if (!(shape.get(i) instanceof String)) {
                    Fields.integer(shape.get(i), f.at("shape") + "[" + i + "]");
                }
            }
            dtype = f.string("dtype");
        }
    }

    /** files: backend -> path; inputs and outputs in calling order. */
    public static final class GraphSpec {
        public final Map<String, String> files;
        public final List<TensorSpec> inputs;
        public final List<TensorSpec> outputs;

        GraphSpec(Object value, String where) {
            Fields f = new Fields(value, where, "files", "inputs", "outputs");
            files = f.stringMap("files");
            inputs = tensors(f, "inputs");
            outputs = tensors(f, "outputs");
        }

        private static List<TensorSpec> tensors(Fields f, String key) {
            List<TensorSpec> result = new ArrayList<>();
            for (Object item : f.list(key)) {
                result.add(new TensorSpec(item, f.at(key) + "[" + result.size() + "]"));
            }
            return result;
        }
    }

    public static final class FileSpec {
        public final String sha256;
        public final long sizeBytes;

        FileSpec(Object value, String where) {
            Fields f = new Fields(value, where, "sha256", "size_bytes");
            sha256 = f.string("sha256");
            sizeBytes = f.integer("size_bytes");
        }
    }

    /** A C-contiguous array inside a file of the bundle. */
    public static final class ArraySpec {
        public final String file;
        public final long offsetBytes;
        public final String dtype;
        public final long[] shape;

        ArraySpec(Object value, String where) {
            Fields f = new Fields(value, where, "file", "offset_bytes", "dtype", "shape");
            file = f.string("file");
            offsetBytes = f.integer("offset_bytes");
            dtype = f.string("dtype");
            shape = f.integers("shape");
        }

        /** Exact, for sizes that a damaged manifest claims. */
        BigInteger sizeBytes() {
            BigInteger size = BigInteger.valueOf(Manifest.dtypes().get(dtype));
            for (long length : shape) {
                size = size.multiply(BigInteger.valueOf(length));
            }
            return size;
        }
    }

    /** Row r = (values[r] - zeroPoint) * scales[r, column / block] * multiplier; scales null: values are float32. */
    public static final class TableSpec {
        public final ArraySpec data;
        public final ArraySpec scales;
        public final long bits;
        public final long zeroPoint;
        public final long block;
        public final long columns;
        public final double multiplier;

        TableSpec(Object value, String where) {
            Fields f =
                new Fields(value, where, "data", "scales", "bits", "zero_point", "block", "columns", "multiplier");
            data = new ArraySpec(f.get("data"), f.at("data"));
            scales = f.isNull("scales") ? null : new ArraySpec(f.get("scales"), f.at("scales"));
            bits = f.integer("bits");
            zeroPoint = f.integer("zero_point");
            block = f.integer("block");
            columns = f.integer("columns");
            multiplier = f.number("multiplier");
        }
    }

    /** A target layer that owns keys and values. */
    public static final class KVLayerSpec {
        public final long layer;
        public final String type;
        public final long kvHeads;
        public final long headDim;

        KVLayerSpec(Object value, String where) {
            this(new Fields(value, where, "layer", "type", "kv_heads", "head_dim"));
        }

        private KVLayerSpec(Fields f) {
            this(f.integer("layer"), f.string("type"), f.integer("kv_heads"), f.integer("head_dim"));
        }

        KVLayerSpec(long layer, String type, long kvHeads, long headDim) {
            this.layer = layer;
            this.type = type;
            this.kvHeads = kvHeads;
            this.headDim = headDim;
        }
    }

    /** donors: type -> the layer whose rows the others read; dtype: of committed rows. */
    public static final class KVSpec {
        public final long window;
        public final long chunkRows;
        public final List<KVLayerSpec> layers;
        public final Map<String, Long> donors;
        public final String dtype;

        KVSpec(Object value, String where) {
            Fields f = new Fields(value, where, "window", "chunk_rows", "layers", "donors", "dtype");
            window = f.integer("window");
            chunkRows = f.integer("chunk_rows");
            layers = new ArrayList<>();
            for (Object item : f.list("layers")) {
                layers.add(new KVLayerSpec(item, f.at("layers") + "[" + layers.size() + "]"));
            }
            donors = f.integerMap("donors");
            dtype = f.string("dtype");
        }

        KVSpec(long window, long chunkRows, List<KVLayerSpec> layers, Map<String, Long> donors, String dtype) {
            this.window = window;
            this.chunkRows = chunkRows;
            this.layers = layers;
            this.donors = donors;
            this.dtype = dtype;
        }

        /** Of one committed row of a layer, k and v. */
        double rowBytes(KVLayerSpec layer) {
            double bytes = (double) layer.headDim * Manifest.dtypes().get(dtype) + (dtype.equals("int8") ? 4 : 0);
            return 2 * layer.kvHeads * bytes;
        }
    }

    public static final class TargetSpec {
        public final long hiddenSize;
        public final long vocabSize;
        public final long numLayers;
        public final long numOwnKvLayers;
        public final long queryHeads;
        public final long perLayerInputSize;
        public final long maxContextTokens;
        public final Map<String, float[]> invFreq;
        public final TableSpec perLayerTable;

        TargetSpec(Object value, String where) {
            Fields f = new Fields(value, where, "hidden_size", "vocab_size", "num_layers", "num_own_kv_layers",
                "query_heads", "per_layer_input_size", "max_context_tokens", "inv_freq", "per_layer_table");
            hiddenSize = f.integer("hidden_size");
            vocabSize = f.integer("vocab_size");
            numLayers = f.integer("num_layers");
            numOwnKvLayers = f.integer("num_own_kv_layers");
            queryHeads = f.integer("query_heads");
            perLayerInputSize = f.integer("per_layer_input_size");
            maxContextTokens = f.integer("max_context_tokens");
            invFreq = frequencies(f);
            perLayerTable = new TableSpec(f.get("per_layer_table"), f.at("per_layer_table"));
        }
    }

    private static Map<String, float[]> frequencies(Fields f) {
        Map<String, float[]> result = new LinkedHashMap<>();
        for (Map.Entry<String, Object> entry : f.map("inv_freq").entrySet()) {
            String where = f.at("inv_freq") + "." + entry.getKey();
            List<Object> items = Fields.list(entry.getValue(), where);
            float[] values = new float[items.size()];
            for (int i = 0; i < values.length; i++) {
                values[i] = (float) Fields.number(items.get(i), where + "[" + i + "]");
            }
            result.put(entry.getKey(), values);
        }
        return result;
    }

    /** The best topK of C centroids, then V/C rows of each; the table lies in cluster order. */
    public static final class CentroidHeadSpec {
        public final TableSpec table;
        public final ArraySpec centroids;
        public final ArraySpec tokenOrdering;
        public final long topK;

        CentroidHeadSpec(Object value, String where) {
            Fields f = new Fields(value, where, "table", "centroids", "token_ordering", "top_k");
            table = new TableSpec(f.get("table"), f.at("table"));
            centroids = new ArraySpec(f.get("centroids"), f.at("centroids"));
            tokenOrdering = new ArraySpec(f.get("token_ordering"), f.at("token_ordering"));
            topK = f.integer("top_k");
        }
    }

    /** centroidHead null: the graph has an output `logits`. */
    public static final class DrafterSpec {
        public final long hiddenSize;
        public final List<String> layerTypes;
        public final Map<String, float[]> invFreq;
        public final long numDraftTokens;
        public final String schedule;
        public final long positionOffset;
        public final CentroidHeadSpec centroidHead;

        DrafterSpec(Object value, String where) {
            Fields f = new Fields(value, where, "hidden_size", "query_heads", "layer_types", "inv_freq",
                "num_draft_tokens", "schedule", "position_offset", "centroid_head");
            hiddenSize = f.integer("hidden_size");
            f.integer("query_heads");
            layerTypes = f.strings("layer_types");
            invFreq = frequencies(f);
            numDraftTokens = f.integer("num_draft_tokens");
            schedule = f.string("schedule");
            positionOffset = f.integer("position_offset");
            centroidHead =
                f.isNull("centroid_head") ? null : new CentroidHeadSpec(f.get("centroid_head"), f.at("centroid_head"));
        }
    }

    /** Any id of eos ends a text. special: name -> text of the tokens that a chat template may write. */
    public static final class TokensSpec {
        public final long bos;
        public final long pad;
        public final long[] eos;
        public final Map<String, String> special;

        TokensSpec(Object value, String where) {
            Fields f = new Fields(value, where, "bos", "pad", "eos", "special");
            bos = f.integer("bos");
            pad = f.integer("pad");
            eos = f.integers("eos");
            special = f.stringMap("special");
        }
    }

    /** The texts before, between and after those of a conversation; systemStart and systemEnd null: no system text. */
    public static final class ChatSpec {
        public final String start;
        public final String systemStart;
        public final String systemEnd;
        public final String userEnd;
        public final String answerEnd;
        public final String prompt;
        public final List<String> stripped;

        ChatSpec(Object value, String where) {
            Fields f = new Fields(
                value, where, "start", "system_start", "system_end", "user_end", "answer_end", "prompt", "stripped");
            start = f.string("start");
            systemStart = f.isNull("system_start") ? null : f.string("system_start");
            systemEnd = f.isNull("system_end") ? null : f.string("system_end");
            userEnd = f.string("user_end");
            answerEnd = f.string("answer_end");
            prompt = f.string("prompt");
            stripped = f.strings("stripped");
        }
    }

    /** Defaults of the checkpoint's generation_config. */
    public static final class SamplingSpec {
        public final boolean doSample;
        public final double temperature;
        public final long topK;
        public final double topP;

        SamplingSpec(Object value, String where) {
            Fields f = new Fields(value, where, "do_sample", "temperature", "top_k", "top_p");
            doSample = f.bool("do_sample");
            temperature = f.number("temperature");
            topK = f.integer("top_k");
            topP = f.number("top_p");
        }
    }

    public static final class QuantSpecSummary {
        public final String recipe;
        public final boolean rowInvariant;

        QuantSpecSummary(Object value, String where) {
            Fields f = new Fields(value, where, "recipe", "row_invariant", "quantized_share", "worst_tensor",
                "worst_relative_error", "per_layer_bits", "per_layer_relative_error");
            recipe = f.string("recipe");
            rowInvariant = f.bool("row_invariant");
            f.number("quantized_share");
            f.string("worst_tensor");
            f.number("worst_relative_error");
            f.integer("per_layer_bits");
            f.number("per_layer_relative_error");
        }
    }

    /** maxContextTokens: the most rows that its graphs take; loadedBytes: graph -> its weights in memory. */
    public static final class BackendSpec {
        public final long maxContextTokens;
        public final TableSpec tokenTable;
        public final QuantSpecSummary quantization;
        public final Map<String, Long> loadedBytes;

        BackendSpec(Object value, String where) {
            Fields f = new Fields(
                value, where, "max_context_tokens", "token_table", "quantization", "weights_bytes", "loaded_bytes");
            maxContextTokens = f.integer("max_context_tokens");
            tokenTable = new TableSpec(f.get("token_table"), f.at("token_table"));
            quantization = new QuantSpecSummary(f.get("quantization"), f.at("quantization"));
            f.integer("weights_bytes");
            loadedBytes = f.integerMap("loaded_bytes");
        }
    }

    public static final class CheckpointSpec {
        public final String source;

        CheckpointSpec(Object value, String where) {
            Fields f = new Fields(value, where, "source", "revision", "dtype", "files");
            source = f.string("source");
            if (!f.isNull("revision")) {
                f.string("revision");
            }
            f.string("dtype");
            f.stringMap("files");
        }
    }
}
