package gemma4.mtp;

import java.io.IOException;
import java.io.Reader;
import java.math.BigInteger;
import java.nio.charset.CharacterCodingException;

/**
 * Strict JSON from a stream of characters, a value at a time, so that a vocabulary needs no tree. It accepts what
 * Python's json does and says what is wrong in the same words: positions count code points. Errors are ValueErrors.
 */
public final class JsonReader {
    private static final int LOOKAHEAD = 16; // characters that a decision may need
    private static final int MAX_DIGITS = 4300; // of an integer, as in Python

    private final Reader reader;
    private final char[] buffer = new char[1 << 13];
    private final StringBuilder text = new StringBuilder();
    private int next;
    private int end;
    private boolean finished;
    private int line = 1;
    private long column = 1; // of the next character; both in code points
    private long index;

    public JsonReader(Reader reader) {
        this.reader = reader;
    }

    /** What kind of value comes: one of { [ " n t f 0 (a number); or 0 with nothing that begins a value. */
    public char peek() {
        skipSpace();
        int first = at(0);
        if (first == '{' || first == '[' || first == '"') {
            return (char) first;
        }
        if (startsWith("null") || startsWith("true") || startsWith("false")) {
            return (char) first;
        }
        boolean number = isDigit(first) || (first == '-' && isDigit(at(1)));
        boolean named = startsWith("NaN") || startsWith("Infinity") || startsWith("-Infinity");
        return number || named ? '0' : 0;
    }

    /** Into an object or array; whether it has an entry. */
    public boolean begin(char bracket) {
        expectValue(bracket);
        advance();
        skipSpace();
        if (at(0) == closing(bracket)) {
            advance();
            return false;
        }
        return true;
    }

    /** After an entry of an object or array: whether another one follows. */
    public boolean more(char bracket) {
        skipSpace();
        int character = at(0);
        if (character == closing(bracket)) {
            advance();
            return false;
        }
        if (character != ',') {
            throw error("Expecting ',' delimiter", here());
        }
        advance();
        skipSpace();
        return true;
    }

    /** The name of an object's entry, up to its value. */
    public String name() {
        skipSpace();
        if (at(0) != '"') {
            throw error("Expecting property name enclosed in double quotes", here());
        }
        String name = string();
        skipSpace();
        if (at(0) != ':') {
            throw error("Expecting ':' delimiter", here());
        }
        advance();
        skipSpace();
        return name;
    }

    public String string() {
        expectValue('"');
        long[] start = here();
        advance();
        text.setLength(0);
        while (true) {
            int character = at(0);
            if (character < 0) {
                throw error("Unterminated string starting at", start);
            }
            if (character == '"') {
                advance();
                return text.toString();
            }
            if (character < ' ') {
                throw error("Invalid control character at", here());
            }
            if (character == '\\') {
                escape(start);
            } else {
                takePlain();
            }
        }
    }

    /** What the buffer holds of a string up to its next quote, escape or control character. */
    private void takePlain() {
        int first = next;
        int halves = 0; // second halves of characters, which do not count
        while (next < end && buffer[next] != '"' && buffer[next] != '\\' && buffer[next] >= ' ') {
            halves += Character.isLowSurrogate(buffer[next++]) ? 1 : 0;
        }
        text.append(buffer, first, next - first);
        index += next - first - halves;
        column += next - first - halves;
    }

    private void escape(long[] start) {
        long[] backslash = here();
        advance();
        int kind = at(0);
        if (kind < 0) {
            throw error("Unterminated string starting at", start);
        }
        int place = "\"\\/bfnrtu".indexOf(kind);
        if (place < 0) {
            throw error("Invalid \\escape", backslash);
        }
        if (kind != 'u') {
            advance();
            text.append("\"\\/\b\f\n\r\t".charAt(place));
            return;
        }
        long[] letter = here();
        advance();
        int value = 0;
        for (int i = 0; i < 4; i++) {
            int digit = at(0) < 128 ? Character.digit(at(0), 16) : -1;
            if (digit < 0 || (i == 3 && at(1) < 0)) {
                throw error("Invalid \\uXXXX escape", letter);
            }
            value = value * 16 + digit;
            advance();
        }
        text.append((char) value);
    }

    /** An integer as Long or BigInteger, another number as Double. */
    public Number number() {
        expectValue('0');
        for (String name : new String[] {"NaN", "Infinity", "-Infinity"}) {
            if (startsWith(name)) {
                advance(name.length());
                return Double.valueOf(name);
            }
        }
        text.setLength(0);
        if (at(0) == '-') {
            take();
        }
        if (at(0) == '0') {
            take();
        } else {
            takeDigits();
        }
        boolean integer = true;
        if (at(0) == '.' && isDigit(at(1))) {
            integer = false;
            take();
            takeDigits();
        }
        boolean exponent = at(0) == 'e' || at(0) == 'E';
        int sign = exponent && (at(1) == '+' || at(1) == '-') ? 1 : 0;
        if (exponent && isDigit(at(1 + sign))) {
            integer = false;
            for (int i = 0; i < 1 + sign; i++) {
                take();
            }
            takeDigits();
        }
        String digits = text.toString();
        if (!integer) {
            return Double.valueOf(digits);
        }
        if (digits.length() > MAX_DIGITS) {
            throw new ValueError("an integer of " + digits.length() + " digits");
        }
        BigInteger value = new BigInteger(digits);
        return value.bitLength() < 64 ? (Number) value.longValue() : value;
    }

    /** true, false or null */
    public Boolean literal() {
        char kind = peek();
        if (kind != 't' && kind != 'f' && kind != 'n') {
            throw error("Expecting value", here());
        }
        advance(kind == 'f' ? 5 : 4);
        return kind == 'n' ? null : (Boolean) (kind == 't');
    }

    /** Over a value of any kind. */
    public void skip() {
        skip(0);
    }

    private void skip(int depth) {
        Json.checkDepth(depth);
        char kind = peek();
        if (kind == '{') {
            for (boolean more = begin('{'); more; more = more('{')) {
                name();
                skip(depth + 1);
            }
        } else if (kind == '[') {
            for (boolean more = begin('['); more; more = more('[')) {
                skip(depth + 1);
            }
        } else if (kind == '"') {
            string();
        } else if (kind == '0') {
            number();
        } else {
            literal();
        }
    }

    /** Nothing but white space may follow. */
    public void end() {
        skipSpace();
        if (at(0) >= 0) {
            throw error("Extra data", here());
        }
    }

    private void expectValue(char kind) {
        if (peek() != kind) {
            throw error("Expecting value", here());
        }
    }

    private static int closing(char bracket) {
        return bracket == '{' ? '}' : ']';
    }

    private static boolean isDigit(int character) {
        return character >= '0' && character <= '9';
    }

    private void takeDigits() {
        while (isDigit(at(0))) {
            take();
        }
    }

    private void take() {
        text.append((char) at(0));
        advance();
    }

    private void skipSpace() {
        for (int c = at(0); c == ' ' || c == '\t' || c == '\n' || c == '\r'; c = at(0)) {
            advance();
        }
    }

    private boolean startsWith(String word) {
        for (int i = 0; i < word.length(); i++) {
            if (at(i) != word.charAt(i)) {
                return false;
            }
        }
        return true;
    }

    /** The character `ahead` of the next one, -1 past the end. */
    private int at(int ahead) {
        if (next + ahead >= end) {
            fill();
        }
        return next + ahead < end ? buffer[next + ahead] : -1;
    }

    private void fill() {
        if (finished) {
            return;
        }
        System.arraycopy(buffer, next, buffer, 0, end - next);
        end -= next;
        next = 0;
        try {
            while (end < LOOKAHEAD && !finished) {
                int count = reader.read(buffer, end, buffer.length - end);
                finished = count < 0;
                end += Math.max(count, 0);
            }
        } catch (CharacterCodingException error) {
            throw new ValueError("it is no UTF-8 text");
        } catch (IOException error) {
            throw new ValueError(String.valueOf(error.getMessage()));
        }
    }

    private void advance() {
        char character = buffer[next++];
        if (Character.isLowSurrogate(character)) {
            return; // counted with its first half
        }
        index++;
        column++;
        if (character == '\n') {
            line++;
            column = 1;
        }
    }

    private void advance(int count) {
        for (int i = 0; i < count; i++) {
            at(0);
            advance();
        }
    }

    private long[] here() {
        return new long[] {line, column, index};
    }

    private static ValueError error(String what, long[] place) {
        return new ValueError(what + ": line " + place[0] + " column " + place[1] + " (char " + place[2] + ")");
    }
}
