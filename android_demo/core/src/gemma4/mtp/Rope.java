package gemma4.mtp;

import java.util.HashMap;
import java.util.Map;

/** Rotary rows that the host makes. */
final class Rope {
    private Rope() {}

    /**
     * cos_*, sin_* [T, D] of the positions from `first` on, both halves equal. The angle is a float32 product; its
     * cosine and sine are taken in double and rounded, so that every host has the same bits (runtime_py/models.py).
     */
    static Map<String, Tensor> rows(Map<String, float[]> invFreq, int first, int count) {
        Map<String, Tensor> rope = new HashMap<>();
        for (String kind : Manifest.KINDS) {
            float[] frequencies = invFreq.get(kind);
            int half = frequencies.length;
            float[] cos = new float[count * half * 2];
            float[] sin = new float[count * half * 2];
            for (int row = 0; row < count; row++) {
                for (int i = 0; i < half; i++) {
                    float angle = (float) (first + row) * frequencies[i];
                    int at = row * half * 2 + i;
                    cos[at] = cos[at + half] = (float) Math.cos(angle);
                    sin[at] = sin[at + half] = (float) Math.sin(angle);
                }
            }
            rope.put("cos_" + kind, Tensor.floats(cos, count, half * 2));
            rope.put("sin_" + kind, Tensor.floats(sin, count, half * 2));
        }
        return rope;
    }
}
