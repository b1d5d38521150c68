package gemma4.mtp;

import gemma4.mtp.Specs.ArraySpec;
import java.io.File;
import java.io.IOException;
import java.io.RandomAccessFile;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;

/**
 * A matrix inside a file, mapped; only the rows that are asked for are read. A mapping holds at most 2 GB, so that a
 * file has several, each of whole rows. For one thread at a time.
 */
final class MappedArray {
    private static final int MAPPING_BYTES = 1 << 30;

    final String dtype;
    final int rows;
    final int columns;
    private final int rowBytes;
    private final int rowsPerMapping;
    private final ByteBuffer[] mappings;
    private final byte[] scratch; // bytes of one row: a draft reads thousands, and makes no garbage

    MappedArray(File bundle, ArraySpec spec) {
        File path = new File(bundle, spec.file);
        dtype = spec.dtype;
        rows = Numbers.toInt(spec.shape[0], spec.file);
        columns = Numbers.toInt(spec.shape[1], spec.file);
        rowBytes = Numbers.toInt(Tensor.size(dtype, 1) * columns, spec.file);
        rowsPerMapping = Math.max(1, MAPPING_BYTES / rowBytes);
        scratch = new byte[rowBytes];
        mappings = new ByteBuffer[(rows - 1) / rowsPerMapping + 1];
        try (RandomAccessFile file = new RandomAccessFile(path, "r")) {
            for (int i = 0; i < mappings.length; i++) {
                long first = (long) i * rowsPerMapping;
                long size = Math.min(rowsPerMapping, rows - first) * rowBytes;
                mappings[i] = file.getChannel()
                                  .map(FileChannel.MapMode.READ_ONLY, spec.offsetBytes + first * rowBytes, size)
                                  .order(ByteOrder.LITTLE_ENDIAN);
            }
        } catch (IOException error) {
            throw new ValueError(path + ": " + error.getMessage());
        }
    }

    /** The mapping of a row, at its beginning. */
    private ByteBuffer row(int index) {
        ByteBuffer mapping = mappings[index / rowsPerMapping];
        mapping.position(index % rowsPerMapping * rowBytes);
        return mapping;
    }

    /** Numbers of a row as they lie: int8, uint8, int32, float32, or bfloat16 as the upper half of a float32. */
    void read(int index, float[] out) {
        ByteBuffer row = row(index);
        if (dtype.equals("float32")) {
            row.asFloatBuffer().get(out, 0, columns);
        } else if (dtype.equals("bfloat16")) {
            for (int i = 0; i < columns; i++) {
                out[i] = Float.intBitsToFloat((row.getShort() & 0xffff) << 16);
            }
        } else {
            row.get(scratch);
            int mask = dtype.equals("int8") ? -1 : 0xff;
            for (int i = 0; i < columns; i++) {
                out[i] = scratch[i] & mask;
            }
        }
    }

    /** A row of two numbers a byte, low nibble first. */
    void readNibbles(int index, float[] out) {
        row(index).get(scratch);
        for (int i = 0; i < columns; i++) {
            out[2 * i] = scratch[i] & 15;
            out[2 * i + 1] = (scratch[i] >> 4) & 15;
        }
    }

    /** int32 */
    int integer(int row, int column) {
        return row(row).asIntBuffer().get(column);
    }
}
