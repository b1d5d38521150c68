package gemma4.mtp.app;

import ai.onnxruntime.NodeInfo;
import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtLoggingLevel;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import gemma4.mtp.Graph;
import gemma4.mtp.Pair;
import gemma4.mtp.Specs;
import gemma4.mtp.Tensor;
import gemma4.mtp.ValueError;
import java.io.File;
import java.nio.FloatBuffer;
import java.nio.ShortBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Graphs on onnxruntime. Inputs are direct buffers that are read where they lie; outputs are small and copied. */
final class OrtGraphs implements Pair.GraphLoader, AutoCloseable {
    private static OrtEnvironment environment;

    private final List<OrtSession> sessions = new ArrayList<>();
    private final int threads;

    /** threads: of the process; the first call sets them. */
    OrtGraphs(int threads) {
        this.threads = threads;
    }

    @Override
    public Graph load(File model, Specs.GraphSpec spec) {
        try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
            options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL); // errors come as exceptions too
            options.disablePerSessionThreads(); // two pools that spin on the same cores halve the speed
            options.setMemoryPatternOptimization(false); // shapes change with every step, a pattern would never repeat
            OrtSession session = environment(threads).createSession(model.getPath(), options);
            sessions.add(session);
            checkDeclared(model, "inputs", spec.inputs, session.getInputInfo());
            checkDeclared(model, "outputs", spec.outputs, session.getOutputInfo());
            return new OrtGraph(session, model);
        } catch (OrtException error) {
            throw refused(model, "load", error);
        }
    }

    private static synchronized OrtEnvironment environment(int threads) throws OrtException {
        if (environment == null) {
            try (OrtEnvironment.ThreadingOptions options = new OrtEnvironment.ThreadingOptions()) {
                options.setGlobalIntraOpNumThreads(threads);
                options.setGlobalInterOpNumThreads(1);
                environment = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL, "gemma4", options);
            }
        }
        return environment;
    }

    /** Names, types and sizes must be the manifest's; a size that calls choose is negative in the model. */
    private static void checkDeclared(
        File model, String what, List<Specs.TensorSpec> specs, Map<String, NodeInfo> found) {
        boolean same = specs.size() == found.size();
        for (Specs.TensorSpec spec : specs) {
            NodeInfo node = found.get(spec.name);
            same &= node != null && node.getInfo() instanceof TensorInfo && fits(spec, (TensorInfo) node.getInfo());
        }
        if (!same) {
            throw new ValueError(model + ": its " + what + " are not those of the manifest; export the bundle again");
        }
    }

    private static boolean fits(Specs.TensorSpec spec, TensorInfo found) {
        long[] shape = found.getShape();
        boolean same = found.type == type(spec.dtype) && shape.length == spec.shape.size();
        for (int i = 0; same && i < shape.length; i++) {
            Object size = spec.shape.get(i);
            same = size instanceof String ? shape[i] < 0 : size.equals(shape[i]);
        }
        return same;
    }

    private static OnnxJavaType type(String dtype) {
        switch (dtype) {
            case "float32":
                return OnnxJavaType.FLOAT;
            case "float16":
                return OnnxJavaType.FLOAT16;
            default:
                return OnnxJavaType.INT8;
        }
    }

    private static ValueError refused(File model, String what, OrtException error) {
        String message = String.valueOf(error.getMessage()).replaceAll("\\s+", " ");
        String first = message.substring(0, Math.min(200, message.length()));
        return new ValueError(model + ": onnxruntime cannot " + what + " it (" + first + "); export the bundle again");
    }

    @Override
    public void close() {
        for (OrtSession session : sessions) {
            try {
                session.close();
            } catch (OrtException error) {
                throw new IllegalStateException(error);
            }
        }
        sessions.clear();
    }

    private static final class OrtGraph implements Graph {
        private final OrtSession session;
        private final File model;

        OrtGraph(OrtSession session, File model) {
            this.session = session;
            this.model = model;
        }

        @Override
        public Map<String, Tensor> run(Map<String, Tensor> feeds) {
            Map<String, OnnxTensor> inputs = new HashMap<>();
            try {
                for (Map.Entry<String, Tensor> feed : feeds.entrySet()) {
                    inputs.put(feed.getKey(), view(feed.getValue()));
                }
                try (OrtSession.Result result = session.run(inputs)) {
                    return copies(result);
                }
            } catch (OrtException error) {
                throw refused(model, "run", error);
            } finally {
                for (OnnxTensor input : inputs.values()) {
                    input.close();
                }
            }
        }

        private static OnnxTensor view(Tensor tensor) throws OrtException {
            long[] shape = new long[tensor.shape.length];
            for (int i = 0; i < shape.length; i++) {
                shape[i] = tensor.shape[i];
            }
            switch (tensor.dtype) {
                case "float32":
                    return OnnxTensor.createTensor(environment, tensor.floats(), shape);
                case "float16":
                    ShortBuffer halves = tensor.bytes().asShortBuffer();
                    return OnnxTensor.createTensor(environment, halves, shape, OnnxJavaType.FLOAT16);
                default:
                    return OnnxTensor.createTensor(environment, tensor.bytes(), shape, OnnxJavaType.INT8);
            }
        }

        private static Map<String, Tensor> copies(OrtSession.Result result) {
            Map<String, Tensor> outputs = new HashMap<>();
            for (Map.Entry<String, OnnxValue> entry : result) {
                OnnxTensor value = (OnnxTensor) entry.getValue();
                long[] sizes = value.getInfo().getShape();
                int[] shape = new int[sizes.length];
                for (int i = 0; i < shape.length; i++) {
                    shape[i] = (int) sizes[i];
                }
                Tensor copy = Tensor.floats(shape);
                FloatBuffer floats = value.getFloatBuffer();
                copy.floats().put(floats);
                outputs.put(entry.getKey(), copy);
            }
            return outputs;
        }
    }
}
