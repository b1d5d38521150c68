package gemma4.mtp;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.CodingErrorAction;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/**
 * Byte-pair encoding with byte fallback, as a tokenizer.json of Gemma describes it: special tokens are cut out of the
 * raw text, spaces become U+2581, runs of line breaks and runs of other characters are words, and in a word the pair
 * with the lowest rank is merged first. Characters outside the vocabulary are their UTF-8 bytes. The same ids and texts
 * as the package `tokenizers` gives.
 */
public final class Tokenizer {
    private static final char SPACE = '\u2581';

    private final Vocabulary vocabulary;
    private final int[] byteIds = new int[256];
    private final Map<Character, int[]> specialLengths = new HashMap<>(); // first character -> lengths, longest first

    public Tokenizer(Vocabulary vocabulary) {
        this.vocabulary = vocabulary;
        for (int value = 0; value < 256; value++) {
            byteIds[value] = vocabulary.id(String.format("<0x%02X>", value));
        }
        for (String content : vocabulary.added.keySet()) {
            int[] lengths = specialLengths.get(content.charAt(0));
            lengths = lengths == null ? new int[1] : Arrays.copyOf(lengths, lengths.length + 1);
            lengths[lengths.length - 1] = -content.length();
            Arrays.sort(lengths);
            specialLengths.put(content.charAt(0), lengths);
        }
        for (int[] lengths : specialLengths.values()) {
            for (int i = 0; i < lengths.length; i++) {
                lengths[i] = -lengths[i];
            }
        }
    }

    public int size() {
        return vocabulary.size();
    }

    /** The id of a token, -1 if there is none. */
    public int id(String content) {
        return vocabulary.id(content);
    }

    /** Ids of a text, without any that the text does not hold. ValueError if it is no Unicode text. */
    public int[] encode(String text) {
        for (int i = 0; i < text.length(); i++) {
            boolean pair = Character.isHighSurrogate(text.charAt(i)) && i + 1 < text.length()
                && Character.isLowSurrogate(text.charAt(i + 1));
            if (Character.isSurrogate(text.charAt(i)) && !pair) {
                throw new ValueError(
                    "character " + text.codePointCount(0, i) + " of the text is no Unicode character; give UTF-8 text");
            }
            i += pair ? 1 : 0;
        }
        IntList ids = new IntList();
        int plain = 0; // where the text since the last special token begins
        for (int i = 0; i < text.length();) {
            int length = addedAt(text, i);
            if (length == 0) {
                i++;
                continue;
            }
            encodePlain(text.substring(plain, i), ids);
            ids.add(vocabulary.added.get(text.substring(i, i + length)));
            i += length;
            plain = i;
        }
        encodePlain(text.substring(plain), ids);
        return ids.toArray();
    }

    /** Ids of a prompt with exactly one bos, whether the text begins with one or not. */
    public int[] encodePrompt(String prompt, long bos) {
        if (prompt.isEmpty()) {
            throw new ValueError("the prompt is empty; give at least one character");
        }
        int[] ids = encode(prompt);
        if (ids.length > 0 && ids[0] == bos) {
            return ids;
        }
        int[] with = new int[ids.length + 1];
        with[0] = (int) bos;
        System.arraycopy(ids, 0, with, 1, ids.length);
        return with;
    }

    private int addedAt(String text, int at) {
        int[] lengths = specialLengths.get(text.charAt(at));
        if (lengths != null) {
            for (int length : lengths) {
                if (at + length <= text.length() && vocabulary.added.containsKey(text.substring(at, at + length))) {
                    return length;
                }
            }
        }
        return 0;
    }

    private void encodePlain(String text, IntList ids) {
        String normal = vocabulary.replacesSpaces ? text.replace(' ', SPACE) : text;
        for (int i = 0; i < normal.length();) {
            int end = i + 1;
            boolean breaks = normal.charAt(i) == '\n';
            while (end < normal.length() && (!vocabulary.splitsLines || (normal.charAt(end) == '\n') == breaks)) {
                end++;
            }
            new Word(normal, i, end).encode(ids);
            i = end;
        }
    }

    /** A word as a linked list of symbols, merged by rank, then by place, until nothing can be merged. */
    private final class Word {
        private final int[] symbols;
        private final int[] next;
        private final int[] previous;
        private int count;
        private long[] heap = new long[16]; // rank << 32 | place
        private int heapSize;

        Word(String text, int from, int to) {
            symbols = new int[3 * (to - from) + 1]; // a character of UTF-16 has at most 3 bytes of UTF-8
            for (int i = from; i < to;) {
                int point = text.codePointAt(i);
                int length = Character.charCount(point);
                addCharacter(text.substring(i, i + length), point);
                i += length;
            }
            next = new int[count];
            previous = new int[count];
            for (int i = 0; i < count; i++) {
                next[i] = i + 1 < count ? i + 1 : -1;
                previous[i] = i - 1;
            }
        }

        private void addCharacter(String character, int point) {
            int id = vocabulary.character(point);
            if (id >= 0) {
                symbols[count++] = id;
                return;
            }
            byte[] bytes = character.getBytes(Manifest.UTF_8);
            for (byte value : bytes) {
                if (byteIds[value & 0xff] < 0) {
                    throw new ValueError("the vocabulary has neither " + Json.repr(character) + " nor its bytes");
                }
            }
            for (byte value : bytes) {
                symbols[count++] = byteIds[value & 0xff];
            }
        }

        void encode(IntList ids) {
            for (int i = 0; i < count; i++) {
                offer(i);
            }
            while (heapSize > 0) {
                long top = pop();
                int place = (int) top;
                int rank = (int) (top >>> 32);
                int right = symbols[place] < 0 ? -1 : next[place];
                if (right < 0 || vocabulary.rank(symbols[place], symbols[right]) != rank) {
                    continue; // merged away since
                }
                symbols[place] = vocabulary.merged(rank);
                symbols[right] = -1;
                next[place] = next[right];
                if (next[place] >= 0) {
                    previous[next[place]] = place;
                }
                offer(place);
                if (previous[place] >= 0) {
                    offer(previous[place]);
                }
            }
            for (int i = count > 0 ? 0 : -1; i >= 0; i = next[i]) {
                ids.add(symbols[i]);
            }
        }

        private void offer(int place) {
            if (next[place] < 0) {
                return;
            }
            int rank = vocabulary.rank(symbols[place], symbols[next[place]]);
            if (rank < 0) {
                return;
            }
            if (heapSize == heap.length) {
                heap = Arrays.copyOf(heap, 2 * heapSize);
            }
            long entry = (long) rank << 32 | place;
            int at = heapSize++;
            for (; at > 0 && heap[(at - 1) / 2] > entry; at = (at - 1) / 2) {
                heap[at] = heap[(at - 1) / 2];
            }
            heap[at] = entry;
        }

        private long pop() {
            long top = heap[0];
            long entry = heap[--heapSize];
            int at = 0;
            while (2 * at + 1 < heapSize) {
                int child = 2 * at + 1;
                child += child + 1 < heapSize && heap[child + 1] < heap[child] ? 1 : 0;
                if (heap[child] >= entry) {
                    break;
                }
                heap[at] = heap[child];
                at = child;
            }
            heap[at] = entry;
            return top;
        }
    }

    /** Whether decoding passes over it: a special token or an id without one. */
    public boolean isSkipped(int id) {
        return vocabulary.isSpecial(id) || vocabulary.token(id) == null;
    }

    /** The byte of UTF-8 that a token stands for, else -1. */
    public int byteOf(int id) {
        String token = vocabulary.token(id);
        if (token == null || token.length() != 6 || !token.startsWith("<0x") || token.charAt(5) != '>') {
            return -1;
        }
        int high = Character.digit(token.charAt(3), 16);
        int low = Character.digit(token.charAt(4), 16);
        return token.charAt(3) > 'f' || token.charAt(4) > 'f' || high < 0 || low < 0 ? -1 : high * 16 + low;
    }

    /**
     * The text of ids without special tokens. A run of byte tokens that is no UTF-8 is a replacement character a byte.
     */
    public String decode(int[] ids) {
        StringBuilder text = new StringBuilder();
        ByteArrayOutputStream run = new ByteArrayOutputStream();
        for (int id : ids) {
            if (isSkipped(id)) {
                continue;
            }
            int value = byteOf(id);
            if (value >= 0) {
                run.write(value);
                continue;
            }
            text.append(utf8(run));
            text.append(vocabulary.token(id).replace(SPACE, ' '));
        }
        return text.append(utf8(run)).toString();
    }

    private static String utf8(ByteArrayOutputStream run) {
        byte[] bytes = run.toByteArray();
        run.reset();
        try {
            return Manifest.UTF_8.newDecoder()
                .onMalformedInput(CodingErrorAction.REPORT)
                .decode(ByteBuffer.wrap(bytes))
                .toString();
        } catch (CharacterCodingException error) {
            char[] unknown = new char[bytes.length];
            Arrays.fill(unknown, '\ufffd');
            return new String(unknown);
        }
    }
}
