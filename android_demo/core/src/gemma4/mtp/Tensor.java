package gemma4.mtp;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;

/**
 * An array in a direct buffer of the machine's byte order, which a graph may read in place. dtype: float32, float16,
 * int8.
 */
public final class Tensor {
    public final String dtype;
    public final int[] shape;
    private final ByteBuffer bytes;

    /** bytes: direct; exactly the elements. */
    public Tensor(ByteBuffer bytes, String dtype, int... shape) {
        if (!bytes.isDirect() || bytes.remaining() != size(dtype, shape)) {
            throw new IllegalArgumentException(bytes.remaining() + " bytes for " + size(dtype, shape));
        }
        this.bytes = bytes;
        this.dtype = dtype;
        this.shape = shape;
    }

    /** Zeros. */
    public static Tensor floats(int... shape) {
        return new Tensor(allocate(size("float32", shape)), "float32", shape);
    }

    public static Tensor floats(float[] values, int... shape) {
        Tensor tensor = floats(shape);
        tensor.floats().put(values);
        return tensor;
    }

    static ByteBuffer allocate(long bytes) {
        if (bytes > Integer.MAX_VALUE) {
            throw new ValueError(
                "one buffer of " + bytes + " bytes is more than the 2 GB that there can be; give a smaller context");
        }
        return ByteBuffer.allocateDirect((int) bytes).order(ByteOrder.nativeOrder());
    }

    static long size(String dtype, int... shape) {
        long size = Manifest.dtypes().get(dtype);
        for (int length : shape) {
            size *= length;
        }
        return size;
    }

    /** A view of the elements, at its beginning. */
    public ByteBuffer bytes() {
        return bytes.slice().order(ByteOrder.nativeOrder());
    }

    public FloatBuffer floats() {
        return bytes().asFloatBuffer();
    }

    /** float32 [rows, n] -> the elements of one row. */
    public float[] row(int index) {
        float[] row = new float[rowLength()];
        FloatBuffer floats = floats();
        floats.position(index * row.length);
        floats.get(row);
        return row;
    }

    /** float32: a view of the rows from `first` on. */
    public Tensor rowsFrom(int first) {
        int[] rest = shape.clone();
        rest[0] -= first;
        ByteBuffer view = bytes();
        view.position(first * rowLength() * 4);
        return new Tensor(view.slice().order(ByteOrder.nativeOrder()), dtype, rest);
    }

    private int rowLength() {
        int length = 1;
        for (int i = 1; i < shape.length; i++) {
            length *= shape[i];
        }
        return length;
    }
}
