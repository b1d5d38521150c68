package gemma4.mtp;

import java.util.Arrays;

/** Token ids of a text that grows. */
public final class IntList {
    private int[] values;
    private int size;

    public IntList(int... values) {
        this.values = values.clone();
        size = values.length;
    }

    public int size() {
        return size;
    }

    public int get(int index) {
        if (index < 0 || index >= size) {
            throw new IndexOutOfBoundsException(index + " of " + size);
        }
        return values[index];
    }

    public int last() {
        return get(size - 1);
    }

    public void add(int value) {
        if (size == values.length) {
            values = Arrays.copyOf(values, Math.max(16, 2 * size));
        }
        values[size++] = value;
    }

    /** Forget all from `length` on. */
    public void cut(int length) {
        size = Math.min(size, length);
    }

    /** A copy of the ids from..to - 1. */
    public int[] slice(int from, int to) {
        if (to > size) {
            throw new IndexOutOfBoundsException(to + " of " + size);
        }
        return Arrays.copyOfRange(values, from, to);
    }

    public int[] toArray() {
        return slice(0, size);
    }
}
