package gemma4.mtp;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * Rows of keys and values: one direct buffer for each part of a dtype (k and v; of int8 also their scales), each row of
 * a part contiguous. A row is made from its float32 row alone, so that it has the same bits whenever it is made.
 */
final class KvRows {
    final String dtype;
    final int capacity;
    private final String[] names;
    private final int heads;
    private final int headDim;
    private final ByteBuffer[] parts;
    private final int[] rowBytes;

    /** Zeros. */
    KvRows(int capacity, int heads, int headDim, String dtype) {
        this.dtype = dtype;
        this.capacity = capacity;
        this.heads = heads;
        this.headDim = headDim;
        names = Manifest.kvParts(dtype);
        parts = new ByteBuffer[names.length];
        rowBytes = new int[names.length];
        for (int i = 0; i < names.length; i++) {
            rowBytes[i] = i < 2 ? heads * headDim * Manifest.dtypes().get(dtype) : heads * 4;
            parts[i] = Tensor.allocate((long) capacity * rowBytes[i]);
        }
    }

    int partCount() {
        return parts.length;
    }

    String partName(int part) {
        return names[part];
    }

    /** A view of `count` rows from `first` on. */
    Tensor view(int part, int first, int count) {
        ByteBuffer view = duplicate(part, first, count);
        ByteBuffer bytes = view.slice().order(ByteOrder.nativeOrder());
        return part < 2 ? new Tensor(bytes, dtype, count, heads, headDim) : new Tensor(bytes, "float32", count, heads);
    }

    private ByteBuffer duplicate(int part, int first, int count) {
        ByteBuffer view = parts[part].duplicate();
        view.limit((first + count) * rowBytes[part]);
        view.position(first * rowBytes[part]);
        return view;
    }

    /** Copy rows of another one of the same kind. */
    void copy(int to, KvRows source, int from, int count) {
        for (int i = 0; i < parts.length; i++) {
            duplicate(i, to, count).put(source.duplicate(i, from, count));
        }
    }

    /**
     * The rows of positions from `position` on, each to slot position mod capacity; of more than fit the last ones
     * stay.
     */
    void copyRing(int position, KvRows source, int from, int count) {
        int dropped = Math.max(0, count - capacity);
        for (int done = dropped; done < count;) {
            int slot = (position + done) % capacity;
            int run = Math.min(count - done, capacity - slot);
            copy(slot, source, from + done, run);
            done += run;
        }
    }

    void clear(int first, int end) {
        if (end <= first) {
            return;
        }
        for (int i = 0; i < parts.length; i++) {
            ByteBuffer view = duplicate(i, first, end - first);
            byte[] zeros = new byte[Math.min(view.remaining(), 1 << 16)];
            while (view.hasRemaining()) {
                view.put(zeros, 0, Math.min(zeros.length, view.remaining()));
            }
        }
    }

    /** Write float32 rows k, v [T, heads, headDim], the first `count` from `from` on, in this dtype. */
    void encode(int to, Tensor k, Tensor v, int from, int count) {
        encodePart(0, to, k, from, count);
        encodePart(1, to, v, from, count);
    }

    private void encodePart(int part, int to, Tensor rows, int from, int count) {
        int length = heads * headDim;
        ByteBuffer source = rows.bytes();
        source.limit((from + count) * length * 4);
        source.position(from * length * 4);
        ByteBuffer target = duplicate(part, to, count).order(ByteOrder.nativeOrder());
        if (dtype.equals("float32")) {
            target.put(source);
            return;
        }
        float[] values = new float[count * length];
        source.slice().order(ByteOrder.nativeOrder()).asFloatBuffer().get(values);
        if (dtype.equals("float16")) {
            for (float value : values) {
                target.putShort(Numbers.toHalf(value));
            }
            return;
        }
        ByteBuffer scales = duplicate(part + 2, to, count).order(ByteOrder.nativeOrder());
        for (int first = 0; first < values.length; first += headDim) {
            scales.putFloat(quantize(values, first, target));
        }
    }

    /** One head of a row: int8 in -127..127, halves rounded to even -> its scale, 0 for zeros. */
    private float quantize(float[] values, int first, ByteBuffer target) {
        float largest = 0;
        for (int i = first; i < first + headDim; i++) {
            largest = Math.max(largest, Math.abs(values[i]));
        }
        float scale = largest / 127f;
        float divisor = scale > 0 ? scale : 1;
        for (int i = first; i < first + headDim; i++) {
            double rounded = Math.rint(values[i] / divisor);
            target.put((byte) Math.max(-127, Math.min(127, rounded))); // a subnormal scale is too coarse
        }
        return scale;
    }
}
