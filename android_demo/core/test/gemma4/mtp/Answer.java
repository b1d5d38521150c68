package gemma4.mtp;

import java.util.Arrays;
import java.util.List;
import java.util.Map;

/**
 * JSON that tests write: Map, List, String, numbers, Boolean, null and arrays of numbers. Characters beyond ASCII are
 * escaped, half characters too.
 */
final class Answer {
    private Answer() {}

    static String json(Object value) {
        StringBuilder out = new StringBuilder();
        write(value, out);
        return out.toString();
    }

    private static void write(Object value, StringBuilder out) {
        if (value instanceof Map) {
            out.append('{');
            String comma = "";
            for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
                out.append(comma);
                quote((String) entry.getKey(), out);
                out.append(':');
                write(entry.getValue(), out);
                comma = ",";
            }
            out.append('}');
        } else if (value instanceof List) {
            out.append('[');
            String comma = "";
            for (Object item : (List<?>) value) {
                out.append(comma);
                write(item, out);
                comma = ",";
            }
            out.append(']');
        } else if (value instanceof int[]) {
            out.append(Arrays.toString((int[]) value));
        } else if (value instanceof float[]) {
            out.append(Arrays.toString((float[]) value));
        } else if (value instanceof double[]) {
            out.append(Arrays.toString((double[]) value));
        } else if (value instanceof String) {
            quote((String) value, out);
        } else {
            out.append(value);
        }
    }

    private static void quote(String text, StringBuilder out) {
        out.append('"');
        for (char character : text.toCharArray()) {
            if (character >= ' ' && character < 127 && character != '"' && character != '\\') {
                out.append(character);
            } else {
                out.append(String.format("\\u%04x", (int) character));
            }
        }
        out.append('"');
    }
}
