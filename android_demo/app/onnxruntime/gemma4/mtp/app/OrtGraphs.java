package gemma4.mtp.app;

import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtLoggingLevel;
import ai.onnxruntime.OrtSession;
import gemma4.mtp.Graph;
import gemma4.mtp.Specs.GraphSpec;
import gemma4.mtp.Specs.TensorSpec;
import gemma4.mtp.ValueError;
import java.io.File;
import java.util.ArrayList;
import java.util.List;

/**
 * Graphs of one bundle on onnxruntime, CPU, with the options of runtime_py/graph_onnx.py where the Java API has them.
 * Another backend is one class like this one.
 */
final class OrtGraphs implements Device.Graphs {
    private static int poolThreads;

    private final OrtEnvironment environment;
    private final List<OrtGraph> loaded = new ArrayList<>();

    /** threads: of the process; what the first one sets stays until the process ends. */
    OrtGraphs(int threads) {
        environment = environment(threads);
    }

    private static synchronized OrtEnvironment environment(int threads) {
        if (poolThreads > 0) {
            return OrtEnvironment.getEnvironment();
        }
        // one pool for all graphs: two that spin on the same cores halve the speed
        try (OrtEnvironment.ThreadingOptions pool = new OrtEnvironment.ThreadingOptions()) {
            pool.setGlobalIntraOpNumThreads(threads);
            pool.setGlobalInterOpNumThreads(1); // a graph is one chain of operations
            OrtEnvironment made =
                OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL, "gemma4-mtp", pool);
            made.setTelemetry(false); // the app has no network to send it by; so nothing is gathered either
            poolThreads = threads;
            return made;
        } catch (OrtException error) {
            throw new ValueError("onnxruntime cannot start with " + threads + " threads: " + error.getMessage());
        }
    }

    @Override
    public int threads() {
        return poolThreads;
    }

    @Override
    public Graph load(File model, GraphSpec spec) {
        try (OrtSession.SessionOptions options = options(spec)) {
            OrtGraph graph = new OrtGraph(environment, options, model, spec);
            loaded.add(graph); // before it is checked, so that it is closed with the others
            graph.check();
            return graph;
        } catch (OrtException error) {
            throw new ValueError(model + ": onnxruntime refuses an option: " + error.getMessage());
        }
    }

    private static OrtSession.SessionOptions options(GraphSpec spec) throws OrtException {
        OrtSession.SessionOptions options = new OrtSession.SessionOptions();
        options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL); // errors come as exceptions too
        options.disablePerSessionThreads(); // the pool of the environment
        options.setMemoryPatternOptimization(false); // shapes change with every step, a pattern would never repeat
        for (TensorSpec put : spec.inputs) {
            if (!put.dtype.equals("float32")) {
                // Rows narrower than float32 are cast in the graph, in memory that grows with the text. Java cannot
                // give the graphs an arena in common, nor ask for late casts; without arenas a step's memory goes back.
                options.setCPUArenaAllocator(false);
                break;
            }
        }
        return options;
    }

    @Override
    public void close() {
        for (OrtGraph graph : loaded) {
            graph.close();
        }
        loaded.clear();
    }
}
