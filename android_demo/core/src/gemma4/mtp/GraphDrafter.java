package gemma4.mtp;

import gemma4.mtp.Specs.DrafterSpec;
import java.io.File;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** The bundle's drafter: its graph, and its head where that is the host's. */
public final class GraphDrafter implements Drafter {
    private final DrafterSpec spec;
    private final Graph graph;
    private final GraphTarget target;
    private final CentroidHead head;

    /** The caller has verified files(). */
    public GraphDrafter(File bundle, Manifest manifest, Graph graph, GraphTarget target) {
        this.spec = manifest.drafter;
        this.graph = graph;
        this.target = target;
        head = spec.centroidHead == null ? null : new CentroidHead(bundle, spec.centroidHead);
    }

    /** Small, and a wrong one would only be slow, so that hashes are to be verified (`Manifest.checkHashes`). */
    public static List<String> files(Manifest manifest, String backend) {
        List<String> files = new ArrayList<>(manifest.graphFiles("drafter", backend));
        Specs.CentroidHeadSpec head = manifest.drafter.centroidHead;
        if (head != null) {
            files.add(head.table.data.file);
            if (head.table.scales != null) {
                files.add(head.table.scales.file);
            }
            files.add(head.centroids.file);
            files.add(head.tokenOrdering.file);
        }
        return files;
    }

    @Override
    public int[] draft(KvCache cache, int token, float[] hidden, int count) {
        int position = (int) (cache.length() + 1 + spec.positionOffset); // N, with the pending token
        Map<String, Tensor> block = new HashMap<>(Rope.rows(spec.invFreq, position, 1));
        for (String kind : Manifest.KINDS) {
            cache.feedDonor(block, kind, "_" + kind);
        }
        int[] drafts = new int[count];
        float[] state = hidden;
        for (int i = 0; i < count; i++) {
            Tensor pair = Tensor.floats(1, 2 * state.length);
            pair.floats().put(target.embed(token)).put(state);
            block.put("pair", pair);
            Map<String, Tensor> out = graph.run(block);
            state = out.get("state").row(0);
            token = head == null ? Numbers.argmax(out.get("logits").row(0)) : head.token(out.get("hidden").row(0));
            drafts[i] = token;
        }
        return drafts;
    }
}
