package gemma4.mtp;

import gemma4.mtp.Specs.TableSpec;
import java.io.File;

/** Token ids -> float32 rows of a row-quantized, mapped table. */
final class EmbeddingTable {
    final int columns;
    final int rows;
    private final TableSpec spec;
    private final MappedArray data;
    private final MappedArray scales;

    EmbeddingTable(File bundle, TableSpec spec) {
        this.spec = spec;
        data = new MappedArray(bundle, spec.data);
        scales = spec.scales == null ? null : new MappedArray(bundle, spec.scales);
        columns = Numbers.toInt(spec.columns, spec.data.file);
        rows = data.rows;
    }

    int stored() {
        return data.columns * (spec.bits == 4 ? 2 : 1);
    }

    int blocks() {
        return scales == null ? 1 : scales.columns;
    }

    /** values [stored]: a row as it lies, before zero point and scales. */
    void values(int row, float[] values) {
        if (spec.bits == 4) {
            data.readNibbles(row, values);
        } else {
            data.read(row, values);
        }
    }

    /** scales [blocks] of a row; ones where it has none */
    void scales(int row, float[] out) {
        if (scales == null) {
            out[0] = 1;
        } else {
            scales.read(row, out);
        }
    }

    /** [columns] of one token; operations in the order of runtime_py/embeddings.py, for the same bits. */
    float[] row(int token) {
        float[] values = new float[stored()];
        values(token, values);
        if (scales != null) {
            float[] steps = new float[blocks()];
            scales(token, steps);
            float zero = spec.zeroPoint;
            for (int i = 0; i < columns; i++) {
                values[i] = (values[i] - zero) * steps[(int) (i / spec.block)];
            }
        }
        float multiplier = (float) spec.multiplier;
        float[] row = new float[columns];
        for (int i = 0; i < columns; i++) {
            row[i] = values[i] * multiplier;
        }
        return row;
    }
}
