package gemma4.mtp;

/** Conversions of numbers. */
final class Numbers {
    private Numbers() {}

    /** ValueError names `where` if the value is no int. */
    static int toInt(long value, String where) {
        if (value != (int) value) {
            throw new ValueError(where + ": " + value + " is more than this program can address");
        }
        return (int) value;
    }

    /** float32 -> the bits of the nearest float16, ties to even, as numpy rounds. */
    static short toHalf(float value) {
        int bits = Float.floatToRawIntBits(value);
        int sign = bits >>> 16 & 0x8000;
        int exponent = (bits >>> 23 & 0xff) - 127;
        int fraction = bits & 0x7fffff;
        if (exponent == 128) { // a NaN keeps a bit of its payload
            return (short) (sign | 0x7c00 | (fraction == 0 ? 0 : Math.max(1, fraction >> 13)));
        }
        if (exponent > 15) {
            return (short) (sign | 0x7c00);
        }
        int shift =
            exponent >= -14 ? 13 : -1 - exponent; // of the fraction with its leading bit, to the unit of the result
        if (shift > 24) {
            return (short) sign;
        }
        int whole = fraction | 0x800000;
        int kept = whole >> shift;
        int rest = whole & (1 << shift) - 1;
        int half = 1 << shift - 1;
        if (rest > half || (rest == half && (kept & 1) == 1)) {
            kept++;
        }
        int scaled = exponent >= -14 ? kept - 0x400 + (exponent + 15 << 10) : kept; // a carry goes into the exponent
        return (short) (sign | scaled);
    }

    static int argmax(float[] values) {
        int best = 0;
        for (int i = 0; i < values.length; i++) {
            if (Float.isNaN(values[i])) {
                return i; // counts as the largest
            }
            if (values[i] > values[best]) {
                best = i;
            }
        }
        return best;
    }
}
