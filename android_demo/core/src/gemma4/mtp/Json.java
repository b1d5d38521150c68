package gemma4.mtp;

import java.io.Reader;
import java.io.StringReader;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.math.MathContext;
import java.math.RoundingMode;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/** JSON values as Map, List, String, Long, BigInteger, Double, Boolean and null; how Python writes such values. */
public final class Json {
    private static final int MAX_DEPTH = 200;

    private Json() {}

    /** ValueError with line and column. */
    public static Object parse(String text) {
        if (text.startsWith("\ufeff")) {
            throw new ValueError("Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)");
        }
        return parse(new StringReader(text));
    }

    public static Object parse(Reader reader) {
        JsonReader json = new JsonReader(reader);
        Object value = value(json, 0);
        json.end();
        return value;
    }

    static Object value(JsonReader json) {
        return value(json, 0);
    }

    private static Object value(JsonReader json, int depth) {
        checkDepth(depth);
        char kind = json.peek();
        if (kind == '{') {
            Map<String, Object> map = new LinkedHashMap<>();
            for (boolean more = json.begin('{'); more; more = json.more('{')) {
                String name = json.name();
                map.put(name, value(json, depth + 1));
            }
            return map;
        }
        if (kind == '[') {
            List<Object> list = new ArrayList<>();
            for (boolean more = json.begin('['); more; more = json.more('[')) {
                list.add(value(json, depth + 1));
            }
            return list;
        }
        if (kind == '"') {
            return json.string();
        }
        return kind == '0' ? json.number() : json.literal();
    }

    /** A reader that calls itself would run out of stack. */
    static void checkDepth(int depth) {
        if (depth > MAX_DEPTH) {
            throw new ValueError("objects and arrays are nested deeper than " + MAX_DEPTH);
        }
    }

    /** Python's str(value) */
    public static String str(Object value) {
        return value instanceof String ? (String) value : repr(value);
    }

    /** Python's repr(value) */
    public static String repr(Object value) {
        if (value == null) {
            return "None";
        }
        if (value instanceof Boolean) {
            return (Boolean) value ? "True" : "False";
        }
        if (value instanceof String) {
            return quoted((String) value);
        }
        if (value instanceof Double) {
            return number((Double) value);
        }
        StringBuilder text = new StringBuilder();
        if (value instanceof Map) {
            for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
                text.append(text.length() > 0 ? ", " : "").append(repr(entry.getKey())).append(": ");
                text.append(repr(entry.getValue()));
            }
            return "{" + text + "}";
        }
        if (value instanceof List) {
            for (Object item : (List<?>) value) {
                text.append(text.length() > 0 ? ", " : "").append(repr(item));
            }
            return "[" + text + "]";
        }
        return value.toString();
    }

    /** The first `count` code points. */
    public static String first(String text, int count) {
        return text.codePointCount(0, text.length()) <= count ? text
                                                              : text.substring(0, text.offsetByCodePoints(0, count));
    }

    private static String quoted(String text) {
        char quote = text.indexOf('\'') >= 0 && text.indexOf('"') < 0 ? '"' : '\'';
        StringBuilder out = new StringBuilder().append(quote);
        for (int i = 0; i < text.length(); i += Character.charCount(text.codePointAt(i))) {
            int point = text.codePointAt(i);
            int simple = "\\\n\r\t".indexOf(point);
            if (simple >= 0) {
                out.append('\\').append("\\nrt".charAt(simple));
            } else if (point == quote) {
                out.append('\\').append(quote);
            } else if (printable(point)) {
                out.appendCodePoint(point);
            } else {
                String form = point < 0x100 ? "\\x%02x" : point < 0x10000 ? "\\u%04x" : "\\U%08x";
                out.append(String.format(form, point));
            }
        }
        return out.append(quote).toString();
    }

    private static boolean printable(int point) {
        switch (Character.getType(point)) {
            case Character.CONTROL:
            case Character.FORMAT:
            case Character.SURROGATE:
            case Character.PRIVATE_USE:
            case Character.UNASSIGNED:
            case Character.LINE_SEPARATOR:
            case Character.PARAGRAPH_SEPARATOR:
                return false;
            case Character.SPACE_SEPARATOR:
                return point == ' ';
            default:
                return true;
        }
    }

    /** The shortest digits that give the same number, as Python writes them. */
    private static String number(double value) {
        if (Double.isNaN(value)) {
            return "nan";
        }
        if (Double.isInfinite(value)) {
            return value > 0 ? "inf" : "-inf";
        }
        String sign = value < 0 || 1 / value < 0 ? "-" : "";
        if (value == 0) {
            return sign + "0.0";
        }
        BigDecimal exact = new BigDecimal(Math.abs(value));
        BigDecimal shortest = exact;
        for (int precision = 1; precision <= 17; precision++) {
            shortest = exact.round(new MathContext(precision, RoundingMode.HALF_EVEN));
            if (shortest.doubleValue() == Math.abs(value)) {
                break;
            }
        }
        String digits = shortest.unscaledValue().toString();
        int exponent = digits.length() - shortest.scale() - 1;
        digits = digits.replaceAll("0+$", "");
        if (exponent < -4 || exponent >= 16) {
            String rest = digits.length() > 1 ? "." + digits.substring(1) : "";
            return String.format(Locale.ROOT, "%s%s%se%s%02d", sign, digits.charAt(0), rest, exponent < 0 ? "-" : "+",
                Math.abs(exponent));
        }
        String plain = new BigDecimal(new BigInteger(digits), digits.length() - 1 - exponent).toPlainString();
        return sign + (plain.contains(".") ? plain : plain + ".0");
    }
}
