package gemma4.mtp;

import java.util.Map;

/** A loaded graph. */
public interface Graph {
    /**
     * Inputs by name -> outputs by name, as the graph's spec in the manifest declares them. Inputs are read in place
     * and not kept; outputs are the caller's. ValueError where the backend cannot run it.
     */
    Map<String, Tensor> run(Map<String, Tensor> feeds);
}
