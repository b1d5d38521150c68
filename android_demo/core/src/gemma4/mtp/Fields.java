package gemma4.mtp;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;

/**
 * A JSON object read strictly as a record: every key present, none unknown, no type bent. ValueErrors name the place,
 * in the words of runtime_py/strict_json.py. Fields are read in the order of the record, so that the same one is named.
 */
final class Fields {
    private static final long MAX_INTEGER = 1L << 53; // what a double holds exactly

    private final Map<?, ?> values;
    private final String where;

    /** value: a JSON value that must be an object with exactly these keys; where: its place, "" of the file itself. */
    Fields(Object value, String where, String... keys) {
        if (!(value instanceof Map)) {
            throw new ValueError(place(where) + ": expected an object, got " + shown(value));
        }
        this.values = (Map<?, ?>) value;
        this.where = where;
        TreeSet<String> missing = new TreeSet<>();
        TreeSet<String> unknown = new TreeSet<>();
        for (Object key : values.keySet()) {
            unknown.add((String) key);
        }
        for (String key : keys) {
            if (!unknown.remove(key)) {
                missing.add(key);
            }
        }
        if (!missing.isEmpty()) {
            throw new ValueError(place(where) + ": key " + Json.repr(missing.first()) + " is missing");
        }
        if (!unknown.isEmpty()) {
            throw new ValueError(place(where) + ": unknown key " + Json.repr(unknown.first()));
        }
    }

    Object get(String key) {
        return values.get(key);
    }

    String at(String key) {
        return where.isEmpty() ? key : where + "." + key;
    }

    boolean isNull(String key) {
        return values.get(key) == null;
    }

    String string(String key) {
        return string(get(key), at(key));
    }

    long integer(String key) {
        return integer(get(key), at(key));
    }

    boolean bool(String key) {
        if (!(get(key) instanceof Boolean)) {
            throw unexpected(get(key), "bool", at(key));
        }
        return (Boolean) get(key);
    }

    double number(String key) {
        return number(get(key), at(key));
    }

    List<Object> list(String key) {
        return list(get(key), at(key));
    }

    long[] integers(String key) {
        List<Object> items = list(key);
        long[] result = new long[items.size()];
        for (int i = 0; i < result.length; i++) {
            result[i] = integer(items.get(i), at(key) + "[" + i + "]");
        }
        return result;
    }

    List<String> strings(String key) {
        List<String> result = new ArrayList<>();
        for (Object item : list(key)) {
            result.add(string(item, at(key) + "[" + result.size() + "]"));
        }
        return result;
    }

    Map<String, Object> map(String key) {
        return map(get(key), at(key));
    }

    Map<String, String> stringMap(String key) {
        Map<String, String> result = new LinkedHashMap<>();
        for (Map.Entry<String, Object> entry : map(key).entrySet()) {
            result.put(entry.getKey(), string(entry.getValue(), at(key) + "." + entry.getKey()));
        }
        return result;
    }

    Map<String, Long> integerMap(String key) {
        Map<String, Long> result = new LinkedHashMap<>();
        for (Map.Entry<String, Object> entry : map(key).entrySet()) {
            result.put(entry.getKey(), integer(entry.getValue(), at(key) + "." + entry.getKey()));
        }
        return result;
    }

    static String string(Object value, String where) {
        if (!(value instanceof String)) {
            throw unexpected(value, "str", where);
        }
        return (String) value;
    }

    static long integer(Object value, String where) {
        if (!(value instanceof Long) || (Long) value < -MAX_INTEGER || (Long) value > MAX_INTEGER) {
            throw unexpected(value, "int", where);
        }
        return (Long) value;
    }

    static double number(Object value, String where) {
        double number = value instanceof Number ? ((Number) value).doubleValue() : Double.NaN;
        if (value instanceof BigInteger && Double.isInfinite(number)) {
            throw new ValueError("int too large to convert to float");
        }
        if (Double.isNaN(number) || Double.isInfinite(number)) {
            throw unexpected(value, "float", where);
        }
        return number;
    }

    static List<Object> list(Object value, String where) {
        if (!(value instanceof List)) {
            throw unexpected(value, "tuple", where);
        }
        return new ArrayList<Object>((List<?>) value);
    }

    static Map<String, Object> map(Object value, String where) {
        if (!(value instanceof Map)) {
            throw unexpected(value, "dict", where);
        }
        Map<String, Object> result = new LinkedHashMap<>();
        for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
            result.put((String) entry.getKey(), entry.getValue());
        }
        return result;
    }

    private static ValueError unexpected(Object value, String kind, String where) {
        return new ValueError(place(where) + ": expected " + kind + ", got " + shown(value));
    }

    private static String shown(Object value) {
        return Json.repr(Json.first(Json.str(value), 60));
    }

    private static String place(String where) {
        return where.isEmpty() ? "the file" : where;
    }
}
