package gemma4.mtp;

import java.io.File;
import java.util.ArrayList;
import java.util.List;

/** A bundle in memory: target, drafter and tokenizer, ready for sessions. */
public final class Pair {
    public static final String BACKEND = "onnx";

    /** Loads a graph of a bundle; ValueError if the backend refuses it. */
    public interface GraphLoader {
        Graph load(File model, Specs.GraphSpec spec);
    }

    public final Manifest manifest;
    public final Target target;
    /** Null where it cannot draft. */
    public final Drafter drafter;
    /** Why the bundle's drafter cannot draft, if it was to; else null. */
    public final String offReason;
    public final DraftPolicy policy;
    public final Tokenizer tokenizer;

    private Pair(
        Manifest manifest, Target target, Drafter drafter, String offReason, DraftPolicy policy, Tokenizer tokenizer) {
        this.manifest = manifest;
        this.target = target;
        this.drafter = drafter;
        this.offReason = offReason;
        this.policy = policy;
        this.tokenizer = tokenizer;
    }

    /** ValueError if the bundle does not load. A drafter that is missing or corrupt only turns drafting off. */
    public static Pair load(File bundle, DraftPolicy wanted, GraphLoader loader) {
        Manifest manifest = Manifest.load(bundle);
        backend(manifest);
        Graph selfDecoder = graph(bundle, manifest, "self_decoder", loader);
        Graph crossDecoder = graph(bundle, manifest, "cross_decoder", loader);
        GraphTarget target = new GraphTarget(bundle, manifest, BACKEND, selfDecoder, crossDecoder);
        Drafter drafter = null;
        String offReason = null;
        DraftPolicy policy = wanted;
        if (wanted.costs == null && wanted.numTokens == 0) {
            offReason = "draft tokens set to 0";
        } else if (wanted.drafters.contains("mtp")) {
            try {
                manifest.checkHashes(bundle, GraphDrafter.files(manifest, BACKEND));
                Graph graph = graph(bundle, manifest, "drafter", loader);
                drafter = new GraphDrafter(bundle, manifest, graph, target);
            } catch (ValueError error) {
                policy = DraftPolicy.fixed(0, "constant", "mtp");
                offReason = error.getMessage();
            }
        }
        return new Pair(manifest, target, drafter, offReason, policy, tokenizer(bundle, manifest));
    }

    /** What the manifest says of BACKEND. ValueError if the bundle was not exported for it. */
    public static Specs.BackendSpec backend(Manifest manifest) {
        Specs.BackendSpec spec = manifest.backends.get(BACKEND);
        if (spec == null) {
            throw new ValueError("the bundle has files for " + ManifestRules.join(manifest.backends.keySet())
                + ", not for " + BACKEND + "; export it with --backend all");
        }
        return spec;
    }

    private static Graph graph(File bundle, Manifest manifest, String name, GraphLoader loader) {
        manifest.checkSizes(bundle, manifest.graphFiles(name, BACKEND));
        Specs.GraphSpec spec = manifest.graphs.get(name);
        return loader.load(new File(bundle, spec.files.get(BACKEND)), spec);
    }

    private static Tokenizer tokenizer(File bundle, Manifest manifest) {
        List<String> files = new ArrayList<>();
        files.add("tokenizer.json");
        manifest.checkSizes(bundle, files);
        File path = new File(bundle, "tokenizer.json");
        Tokenizer tokenizer = new Tokenizer(Vocabulary.load(path, manifest.tokens.special));
        if (tokenizer.size() > manifest.target.vocabSize) {
            throw new ValueError(
                path + ": " + tokenizer.size() + " tokens, the model has " + manifest.target.vocabSize);
        }
        return tokenizer;
    }
}
