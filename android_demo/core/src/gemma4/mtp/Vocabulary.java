package gemma4.mtp;

import java.io.BufferedReader;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.Reader;
import java.nio.charset.CharsetDecoder;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;

/**
 * Tokens and merges of a tokenizer.json, read as a stream: a pair of ids -> its rank, in an open hash table of
 * primitives. What the file asks for beyond Gemma's form is refused by name.
 */
public final class Vocabulary {
    private static final String SPLIT_LINES = "\\n+|[^\\n]+";
    private static final List<String> PARTS = Arrays.asList("decoder", "model");
    private static final List<String> NOT_APPLIED =
        Arrays.asList("truncation", "padding", "post_processor"); // as in runtime_py/text.py

    /** Tokens that are cut out of the raw text. */
    final Map<String, Integer> added = new LinkedHashMap<>();
    boolean replacesSpaces;
    boolean splitsLines;
    private final Map<Integer, Boolean> special = new HashMap<>();
    private int[] slots = new int[1 << 11]; // open hash table of tokens: id + 1; 0 is free
    private int count;
    private final Map<Integer, Integer> characters = new HashMap<>(); // code point -> id
    private String[] tokens = new String[1 << 10];
    private int size; // of the largest id, plus one
    private long[] pairs = new long[1 << 10]; // left << 32 | right, plus one; 0 is free
    private int[] ranks = new int[1 << 10];
    private int[] results = new int[1 << 10]; // of each rank: the id of the merged token
    private int merges;
    private int modelTokens; // without the added ones
    private final Set<String> outside = new HashSet<>(); // added tokens that the model has not
    private boolean splitsSpaces;

    private Vocabulary() {}

    /**
     * names: special tokens by what they are called; they are special whatever the file says. ValueError names the
     * file.
     */
    public static Vocabulary load(File path, Map<String, String> names) {
        Vocabulary vocabulary = new Vocabulary();
        CharsetDecoder utf8 = Manifest.UTF_8.newDecoder(); // one that tells of what is none
        try (Reader reader = new BufferedReader(new InputStreamReader(new FileInputStream(path), utf8), 1 << 16)) {
            vocabulary.read(new JsonReader(reader));
            vocabulary.finish(names);
        } catch (ValueError | IOException error) {
            throw new ValueError(path + ": " + error.getMessage());
        }
        return vocabulary;
    }

    int size() {
        return size;
    }

    /** The text of a token as the file has it, or null. */
    String token(int id) {
        return id >= 0 && id < size ? tokens[id] : null;
    }

    boolean isSpecial(int id) {
        return special.containsKey(id);
    }

    /** -1 if there is none. */
    int id(String token) {
        return id(token, "");
    }

    /**
     * Of the token whose text is both, one after the other. It makes no string: the merges would need half a million.
     */
    private int id(String left, String right) {
        int power = 1;
        for (int i = 0; i < right.length(); i++) {
            power *= 31;
        }
        int hash = left.hashCode() * power + right.hashCode(); // the hash code of the whole
        for (int slot = first(hash);; slot = slot + 1 & slots.length - 1) {
            String token = slots[slot] == 0 ? null : tokens[slots[slot] - 1];
            boolean same = token != null && token.length() == left.length() + right.length() && token.startsWith(left)
                && token.endsWith(right);
            if (token == null || same) {
                return slots[slot] - 1;
            }
        }
    }

    private int first(int hash) {
        return hash * 0x9E3779B9 >>> 8 & slots.length - 1;
    }

    private void addSlot(int id) {
        int slot = first(tokens[id].hashCode());
        while (slots[slot] != 0) {
            slot = slot + 1 & slots.length - 1;
        }
        slots[slot] = id + 1;
    }

    /** The id of the token that is one character, else -1. */
    int character(int point) {
        Integer id = characters.get(point);
        return id == null ? -1 : id;
    }

    /** -1 where the two are not merged. */
    int rank(int left, int right) {
        int slot = slot(pairs, key(left, right));
        return pairs[slot] == 0 ? -1 : ranks[slot];
    }

    /** The token that the merge of this rank makes. */
    int merged(int rank) {
        return results[rank];
    }

    private static long key(int left, int right) {
        return ((long) left << 32 | right) + 1;
    }

    private static int slot(long[] table, long key) {
        long mixed = key * 0x9E3779B97F4A7C15L;
        int slot = (int) (mixed >>> 32) & table.length - 1;
        while (table[slot] != 0 && table[slot] != key) {
            slot = slot + 1 & table.length - 1;
        }
        return slot;
    }

    private void read(JsonReader json) {
        Set<String> found = new HashSet<>();
        for (boolean more = json.begin('{'); more; more = json.more('{')) {
            String name = json.name();
            found.add(name);
            if (name.equals("model")) {
                readModel(json);
            } else if (name.equals("added_tokens")) {
                for (boolean token = json.begin('['); token; token = json.more('[')) {
                    readAdded(Fields.map(Json.value(json), "added_tokens"));
                }
            } else if (name.equals("normalizer")) {
                replacesSpaces = replacesSpaces(Json.value(json));
            } else if (name.equals("pre_tokenizer")) {
                splitsLines = splitsLines(Json.value(json));
            } else if (name.equals("decoder")) {
                checkDecoder(Json.value(json));
            } else if (name.equals("version")) {
                supported("version", Json.value(json), "'1.0'");
            } else if (NOT_APPLIED.contains(name)) {
                json.skip();
            } else {
                throw new ValueError("a tokenizer has no " + Json.repr(Json.first(name, 60)));
            }
        }
        json.end();
        for (String part : PARTS) {
            if (!found.contains(part)) {
                throw new ValueError("it has no " + part);
            }
        }
        if (splitsSpaces && !replacesSpaces) {
            throw new ValueError(
                "a pre_tokenizer that splits at spaces is not supported here without a normalizer that replaces them");
        }
    }

    private void readAdded(Map<String, Object> token) {
        String content = Fields.string(token.get("content"), "content");
        int id = Numbers.toInt(Fields.integer(token.get("id"), "id"), "id");
        for (String rule : new String[] {"single_word", "lstrip", "rstrip", "normalized"}) {
            if (!Boolean.FALSE.equals(token.get(rule))) {
                throw new ValueError(
                    "added token " + Json.repr(content) + " is " + rule + ", which is not supported here");
            }
        }
        if (content.isEmpty()) {
            throw new ValueError("an added token is empty");
        }
        if (!(token.get("special") instanceof Boolean)) {
            throw new ValueError("added token " + Json.repr(content) + " does not say whether it is special");
        }
        if (id(content) < 0) {
            outside.add(content);
        }
        put(content, id);
        added.put(content, id);
        if (Boolean.TRUE.equals(token.get("special"))) {
            special.put(id, true);
        }
    }

    private static boolean replacesSpaces(Object normalizer) {
        if (normalizer == null) {
            return false;
        }
        String known = "{'type': 'Replace', 'pattern': {'String': ' '}, 'content': '\u2581'}";
        return supported("normalizer", normalizer, known);
    }

    private boolean splitsLines(Object splitter) {
        if (splitter == null) {
            return false;
        }
        String spaces =
            "{'type': 'Split', 'pattern': {'String': ' '}, 'behavior': 'MergedWithPrevious', 'invert': False}";
        splitsSpaces = Json.repr(splitter).equals(spaces);
        if (splitsSpaces) {
            return false; // none are left
        }
        String lines = "{'type': 'Split', 'pattern': {'Regex': " + Json.repr(SPLIT_LINES)
            + "}, 'behavior': 'Isolated', 'invert': False}";
        return supported("pre_tokenizer", splitter, lines);
    }

    private static void checkDecoder(Object decoder) {
        supported("decoder", decoder,
            "{'type': 'Sequence', 'decoders': [{'type': 'Replace', 'pattern': {'String': '\u2581'}, "
                + "'content': ' '}, {'type': 'ByteFallback'}, {'type': 'Fuse'}]}");
    }

    private static boolean supported(String what, Object found, String known) {
        if (!Json.repr(found).equals(known)) {
            throw new ValueError(what + " " + Json.first(Json.repr(found), 60) + " is not supported here");
        }
        return true;
    }

    private void readModel(JsonReader json) {
        Map<String, Object> settings = new TreeMap<>();
        boolean hasMerges = false;
        for (boolean more = json.begin('{'); more; more = json.more('{')) {
            String name = json.name();
            hasMerges |= name.equals("merges");
            if (name.equals("vocab")) {
                for (boolean token = json.begin('{'); token; token = json.more('{')) {
                    String content = json.name();
                    outside.remove(content);
                    modelTokens++;
                    put(content, Numbers.toInt(Fields.integer(json.number(), "vocab"), "vocab"));
                }
            } else if (name.equals("merges")) {
                readMerges(json);
            } else {
                settings.put(name, Json.value(json));
            }
        }
        if (!hasMerges) {
            throw new ValueError("the model has no merges");
        }
        Map<String, Object> known = new TreeMap<>();
        known.put("type", "BPE");
        known.put("byte_fallback", true);
        for (Map.Entry<String, Object> entry : known.entrySet()) {
            if (!entry.getValue().equals(settings.get(entry.getKey()))) {
                throw unsupported(entry.getKey(), settings.get(entry.getKey()));
            }
        }
        for (String none :
            new String[] {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"}) {
            if (settings.get(none) != null && !Boolean.FALSE.equals(settings.get(none))) {
                throw unsupported(none, settings.get(none));
            }
        }
    }

    private static ValueError unsupported(String setting, Object value) {
        return new ValueError("model " + setting + " " + Json.first(Json.repr(value), 60) + " is not supported here");
    }

    private void readMerges(JsonReader json) {
        if (count == 0) {
            throw new ValueError("the merges stand before the vocabulary");
        }
        char form = 0; // of the first one
        for (boolean more = json.begin('['); more; more = json.more('[')) {
            String left;
            String right;
            form = form == 0 ? json.peek() : form;
            if (json.peek() != form) {
                throw new ValueError("merges of two forms");
            }
            if (form == '[') {
                json.begin('[');
                left = json.string();
                json.more('[');
                right = json.string();
                json.more('[');
            } else {
                String[] both = json.string().split(" ", 2);
                left = both[0];
                right = both.length > 1 ? both[1] : "";
            }
            addMerge(known(left, ""), known(right, ""), known(left, right));
        }
    }

    private int known(String left, String right) {
        int id = id(left, right);
        if (id < 0) {
            throw new ValueError("merge " + merges + " needs the token " + Json.repr(Json.first(left + right, 60))
                + ", which the vocabulary has not");
        }
        return id;
    }

    /** Of a pair that comes twice the later one stands, as in `tokenizers`. */
    private void addMerge(int left, int right, int result) {
        if (2 * (merges + 1) > pairs.length) {
            long[] oldPairs = pairs;
            int[] oldRanks = ranks;
            pairs = new long[2 * oldPairs.length];
            ranks = new int[pairs.length];
            for (int i = 0; i < oldPairs.length; i++) {
                if (oldPairs[i] != 0) {
                    int slot = slot(pairs, oldPairs[i]);
                    pairs[slot] = oldPairs[i];
                    ranks[slot] = oldRanks[i];
                }
            }
        }
        if (merges == results.length) {
            results = Arrays.copyOf(results, 2 * merges);
        }
        int slot = slot(pairs, key(left, right));
        pairs[slot] = key(left, right);
        ranks[slot] = merges;
        results[merges++] = result;
    }

    private void put(String token, int id) {
        if (id < 0 || id >= 1 << 24) {
            throw new ValueError("token " + Json.repr(Json.first(token, 60)) + " has the id " + id);
        }
        if (id >= tokens.length) {
            tokens = Arrays.copyOf(tokens, Math.max(id + 1, 2 * tokens.length));
        }
        if (!isText(token)) {
            throw new ValueError("token " + id + " is no Unicode text");
        }
        int known = id(token);
        if ((known >= 0 && known != id) || (tokens[id] != null && !tokens[id].equals(token))) {
            throw new ValueError("token " + Json.repr(Json.first(token, 60)) + " or its id " + id + " comes twice");
        }
        if (known < 0) {
            tokens[id] = token;
            size = Math.max(size, id + 1);
            if (2 * ++count > slots.length) {
                slots = new int[2 * slots.length];
                for (int i = 0; i < size; i++) {
                    if (tokens[i] != null) {
                        addSlot(i);
                    }
                }
            } else {
                addSlot(id);
            }
        }
        if (!token.isEmpty() && token.codePointCount(0, token.length()) == 1) {
            characters.put(token.codePointAt(0), id);
        }
    }

    /** Without half a pair of surrogates. */
    private static boolean isText(String token) {
        for (int i = 0; i < token.length(); i++) {
            if (Character.isSurrogate(token.charAt(i)) && !Character.isSupplementaryCodePoint(token.codePointAt(i++))) {
                return false;
            }
        }
        return true;
    }

    private void finish(Map<String, String> names) {
        int last = -1;
        for (Map.Entry<String, Integer> token : added.entrySet()) { // `tokenizers` counts on, whatever the file says
            int next = Math.max(last + 1, modelTokens);
            if (outside.contains(token.getKey()) && token.getValue() != next) {
                throw new ValueError("added token " + Json.repr(token.getKey()) + " has the id " + token.getValue()
                    + ", and " + next + " comes next");
            }
            last = Math.max(last, token.getValue());
        }
        for (String content : names.values()) {
            int id = id(content);
            if (id >= 0) {
                added.put(content, id);
                special.put(id, true);
            }
        }
    }
}
