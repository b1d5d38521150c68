package gemma4.mtp;

import gemma4.mtp.Specs.KVLayerSpec;
import java.io.File;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * The two graphs of the target and its embedding tables.
 *
 * Legend: T rows run, R rows asked for (all or the last), H hidden size, d per-layer input size, g query heads per kv
 * head.
 */
public final class GraphTarget implements Target {
    private final Manifest manifest;
    private final int maxContextTokens;
    private final int group;
    private final int ownLayers;
    private final int layers;
    private final int hiddenSize;
    private final int perLayerSize;
    private final Graph selfDecoder;
    private final Graph crossDecoder;
    private final EmbeddingTable tokens;
    private final EmbeddingTable perLayer;

    /** ValueError if a file of the tables is missing or has the wrong size. */
    public GraphTarget(File bundle, Manifest manifest, String backend, Graph selfDecoder, Graph crossDecoder) {
        this.manifest = manifest;
        this.selfDecoder = selfDecoder;
        this.crossDecoder = crossDecoder;
        Specs.BackendSpec spec = manifest.backends.get(backend);
        List<String> files = new ArrayList<>();
        for (Specs.TableSpec table : new Specs.TableSpec[] {spec.tokenTable, manifest.target.perLayerTable}) {
            files.add(table.data.file);
            if (table.scales != null) {
                files.add(table.scales.file);
            }
        }
        manifest.checkSizes(bundle, files);
        maxContextTokens = Numbers.toInt(spec.maxContextTokens, "max_context_tokens");
        group = (int) (manifest.target.queryHeads / manifest.kv.layers.get(0).kvHeads);
        ownLayers = Numbers.toInt(manifest.target.numOwnKvLayers, "num_own_kv_layers");
        layers = Numbers.toInt(manifest.target.numLayers, "num_layers");
        hiddenSize = Numbers.toInt(manifest.target.hiddenSize, "hidden_size");
        perLayerSize = Numbers.toInt(manifest.target.perLayerInputSize, "per_layer_input_size");
        tokens = new EmbeddingTable(bundle, spec.tokenTable);
        perLayer = new EmbeddingTable(bundle, manifest.target.perLayerTable);
    }

    @Override
    public int vocabSize() {
        return tokens.rows;
    }

    @Override
    public int maxContextTokens() {
        return maxContextTokens;
    }

    @Override
    public KvCache newCache(int contextTokens, int marginRows) {
        return new KvCache(manifest.kv, group, contextTokens, marginRows);
    }

    /** [H] of a token, scaled. */
    float[] embed(int token) {
        return tokens.row(token);
    }

    @Override
    public Output forward(KvCache cache, int[] ids, boolean lastRowOnly) {
        Rows rows = new Rows(cache, ids);
        Map<String, Tensor> own = runSelf(rows, cache);
        int first = lastRowOnly ? ids.length - 1 : 0;
        Map<String, Tensor> feeds = rows.feeds(ownLayers, layers, first);
        feeds.put("x", own.get("x").rowsFrom(first));
        for (String kind : Manifest.KINDS) {
            int donor = cache.donor(kind);
            cache.feedPast(feeds, donor, "", "_" + kind);
            cache.feedTail(feeds, donor, "tail_", "_" + kind);
            feeds.put("new_k_" + kind, own.get("new_k." + donor));
            feeds.put("new_v_" + kind, own.get("new_v." + donor));
        }
        Map<String, Tensor> out = crossDecoder.run(feeds);
        return new Output(out.get("logits"), out.get("hidden"), newRows(own, "k"), newRows(own, "v"));
    }

    @Override
    public void append(KvCache cache, int[] ids) {
        Map<String, Tensor> own = runSelf(new Rows(cache, ids), cache);
        cache.commit(newRows(own, "k"), newRows(own, "v"), ids.length);
    }

    private Map<String, Tensor> runSelf(Rows rows, KvCache cache) {
        Map<String, Tensor> feeds = rows.feeds(0, ownLayers, 0);
        for (KVLayerSpec layer : manifest.kv.layers) {
            cache.feedPast(feeds, (int) layer.layer, "past_", "." + layer.layer);
            cache.feedTail(feeds, (int) layer.layer, "tail_", "." + layer.layer);
        }
        return selfDecoder.run(feeds);
    }

    private Tensor[] newRows(Map<String, Tensor> own, String part) {
        Tensor[] rows = new Tensor[ownLayers];
        for (int i = 0; i < ownLayers; i++) {
            rows[i] = own.get("new_" + part + "." + i);
        }
        return rows;
    }

    /** What the host prepares for T tokens that follow the committed rows. */
    private final class Rows {
        private final Tensor embeds; // [T, H]
        private final Tensor[] perLayerRows; // of each layer [T, d]
        private final Map<String, Tensor> rope;
        private final Map<String, Tensor> layout;

        Rows(KvCache cache, int[] ids) {
            embeds = Tensor.floats(ids.length, hiddenSize);
            perLayerRows = new Tensor[layers];
            FloatBuffer[] out = new FloatBuffer[layers];
            for (int layer = 0; layer < layers; layer++) {
                perLayerRows[layer] = Tensor.floats(ids.length, perLayerSize);
                out[layer] = perLayerRows[layer].floats();
            }
            FloatBuffer embedded = embeds.floats();
            for (int id : ids) {
                embedded.put(tokens.row(id));
                float[] all = perLayer.row(id);
                for (int layer = 0; layer < layers; layer++) {
                    out[layer].put(all, layer * perLayerSize, perLayerSize);
                }
            }
            rope = Rope.rows(manifest.target.invFreq, cache.length(), ids.length);
            layout = cache.layout(ids.length);
        }

        /** Inputs of the layers first..end - 1 for the rows from `row` on. */
        Map<String, Tensor> feeds(int firstLayer, int endLayer, int row) {
            Map<String, Tensor> feeds = new HashMap<>();
            feeds.put("embeds", embeds.rowsFrom(row));
            for (int layer = firstLayer; layer < endLayer; layer++) {
                feeds.put("per_layer." + layer, perLayerRows[layer].rowsFrom(row));
            }
            for (Map.Entry<String, Tensor> entry : rope.entrySet()) {
                feeds.put(entry.getKey(), entry.getValue().rowsFrom(row));
            }
            for (Map.Entry<String, Tensor> entry : layout.entrySet()) {
                boolean shared = entry.getKey().equals("mask_past_full") || entry.getKey().equals("place");
                feeds.put(entry.getKey(), shared ? entry.getValue() : entry.getValue().rowsFrom(row * group));
            }
            return feeds;
        }
    }
}
