package gemma4.mtp;

import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.Closeable;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.HashMap;
import java.util.Map;

/**
 * Real graphs for tests: a Python process (tests/graph_server.py) holds the .onnx files and gets the buffers in pipes.
 */
final class PythonGraphs implements Pair.GraphLoader, Closeable {
    private final Process process;
    private final DataOutputStream out;
    private final DataInputStream in;

    PythonGraphs(String python) throws IOException {
        process = new ProcessBuilder(python, "-m", "tests.graph_server")
                      .redirectError(ProcessBuilder.Redirect.INHERIT)
                      .start();
        out = new DataOutputStream(new BufferedOutputStream(process.getOutputStream(), 1 << 16));
        in = new DataInputStream(new BufferedInputStream(process.getInputStream(), 1 << 16));
    }

    @Override
    public Graph load(final File model, Specs.GraphSpec spec) {
        try {
            out.writeInt(-1);
            out.writeUTF(model.getPath());
            out.flush();
            checkError();
            final int index = in.readInt();
            return new Graph() {
                @Override
                public Map<String, Tensor> run(Map<String, Tensor> feeds) {
                    try {
                        return call(index, feeds);
                    } catch (IOException error) {
                        throw new IllegalStateException(error);
                    }
                }
            };
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    private Map<String, Tensor> call(int index, Map<String, Tensor> feeds) throws IOException {
        out.writeInt(index);
        out.writeInt(feeds.size());
        for (Map.Entry<String, Tensor> feed : feeds.entrySet()) {
            write(feed.getKey(), feed.getValue());
        }
        out.flush();
        checkError();
        Map<String, Tensor> result = new HashMap<>();
        for (int i = in.readInt(); i > 0; i--) {
            String name = in.readUTF();
            int[] shape = new int[in.readInt()];
            for (int axis = 0; axis < shape.length; axis++) {
                shape[axis] = in.readInt();
            }
            byte[] bytes = new byte[(int) Tensor.size("float32", shape)];
            in.readFully(bytes);
            ByteBuffer buffer = Tensor.allocate(bytes.length);
            buffer.put(bytes).rewind();
            result.put(name, new Tensor(buffer, "float32", shape));
        }
        return result;
    }

    private void write(String name, Tensor tensor) throws IOException {
        out.writeUTF(name);
        out.writeUTF(tensor.dtype);
        out.writeInt(tensor.shape.length);
        for (int size : tensor.shape) {
            out.writeInt(size);
        }
        byte[] bytes = new byte[tensor.bytes().remaining()];
        tensor.bytes().get(bytes);
        out.write(bytes);
    }

    private void checkError() throws IOException {
        String error = in.readUTF();
        if (!error.isEmpty()) {
            throw new ValueError(error);
        }
    }

    @Override
    public void close() throws IOException {
        out.close();
    }
}
