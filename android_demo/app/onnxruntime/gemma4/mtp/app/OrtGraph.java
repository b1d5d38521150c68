package gemma4.mtp.app;

import ai.onnxruntime.NodeInfo;
import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import ai.onnxruntime.ValueInfo;
import gemma4.mtp.Graph;
import gemma4.mtp.Specs.GraphSpec;
import gemma4.mtp.Specs.TensorSpec;
import gemma4.mtp.Tensor;
import gemma4.mtp.ValueError;
import java.io.File;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;

/**
 * One .onnx file with its external data. Inputs are read where they lie and outputs written where they will be read, in
 * direct buffers: nothing is copied.
 */
final class OrtGraph implements Graph {
    private final OrtEnvironment environment;
    private final OrtSession session;
    private final GraphSpec spec;
    private final File model;

    /** ValueError if onnxruntime refuses the file. */
    OrtGraph(OrtEnvironment environment, OrtSession.SessionOptions options, File model, GraphSpec spec) {
        this.environment = environment;
        this.model = model;
        this.spec = spec;
        try {
            session = environment.createSession(model.getPath(), options);
        } catch (OrtException error) {
            throw new ValueError(
                model + ": onnxruntime cannot load it (" + brief(error) + "); export the bundle again");
        }
    }

    /** ValueError if inputs and outputs are not those of the spec. */
    void check() {
        try {
            if (!agree(session.getInputInfo(), spec.inputs) || !agree(session.getOutputInfo(), spec.outputs)) {
                throw new ValueError(
                    model + ": inputs and outputs are not those of the manifest; export the bundle again");
            }
        } catch (OrtException error) {
            throw new ValueError(model + ": " + brief(error));
        }
    }

    private static boolean agree(Map<String, NodeInfo> found, List<TensorSpec> wanted) {
        Iterator<NodeInfo> nodes = found.values().iterator();
        for (TensorSpec put : wanted) {
            if (!nodes.hasNext() || !agree(nodes.next(), put)) {
                return false;
            }
        }
        return !nodes.hasNext();
    }

    private static boolean agree(NodeInfo node, TensorSpec put) {
        ValueInfo value = node.getInfo();
        if (!node.getName().equals(put.name) || !(value instanceof TensorInfo)) {
            return false;
        }
        TensorInfo info = (TensorInfo) value;
        long[] shape = info.getShape();
        if (info.type != type(put.dtype) || shape.length != put.shape.size()) {
            return false;
        }
        for (int i = 0; i < shape.length; i++) {
            Object size = put.shape.get(i);
            boolean same = shape[i] < 0 ? info.getDimensionNames()[i].equals(size) : size.equals(shape[i]);
            if (!same) {
                return false;
            }
        }
        return true;
    }

    private static OnnxJavaType type(String dtype) {
        if (dtype.equals("int8")) {
            return OnnxJavaType.INT8;
        }
        return dtype.equals("float16") ? OnnxJavaType.FLOAT16 : OnnxJavaType.FLOAT;
    }

    @Override
    public Map<String, Tensor> run(Map<String, Tensor> feeds) {
        Map<String, OnnxTensor> inputs = new HashMap<>();
        Map<String, OnnxTensor> outputs = new HashMap<>();
        Map<String, Tensor> results = new HashMap<>();
        Map<Object, Integer> sizes = new HashMap<>();
        try {
            for (TensorSpec put : spec.inputs) {
                Tensor tensor = feeds.get(put.name);
                inputs.put(put.name, wrap(tensor));
                for (int i = 0; i < tensor.shape.length; i++) {
                    sizes.put(put.shape.get(i), tensor.shape[i]);
                }
            }
            for (TensorSpec put : spec.outputs) {
                int[] shape = new int[put.shape.size()];
                for (int i = 0; i < shape.length; i++) {
                    Object size = put.shape.get(i);
                    shape[i] = size instanceof Long ? (int) (long) size : sizes.get(size); // T or R, an input's too
                }
                results.put(put.name, Tensor.floats(shape));
                outputs.put(put.name, wrap(results.get(put.name)));
            }
            session.run(inputs, Collections.<String>emptySet(), outputs).close();
            return results;
        } catch (OrtException error) {
            throw new ValueError(model + ": onnxruntime cannot run it (" + brief(error) + "); export the bundle again");
        } finally {
            close(inputs.values());
            close(outputs.values());
        }
    }

    /** The buffer itself, for it is direct. */
    private OnnxTensor wrap(Tensor tensor) throws OrtException {
        long[] shape = new long[tensor.shape.length];
        for (int i = 0; i < shape.length; i++) {
            shape[i] = tensor.shape[i];
        }
        return OnnxTensor.createTensor(environment, tensor.bytes(), shape, type(tensor.dtype));
    }

    private static void close(Collection<OnnxTensor> tensors) {
        for (OnnxTensor tensor : tensors) {
            tensor.close();
        }
    }

    private static String brief(OrtException error) {
        String text = String.valueOf(error.getMessage()).trim().replaceAll("\\s+", " ");
        return text.substring(0, Math.min(200, text.length()));
    }

    void close() {
        try {
            session.close();
        } catch (OrtException error) {
            throw new IllegalStateException(error); // it says so of a session that was closed before
        }
    }
}
