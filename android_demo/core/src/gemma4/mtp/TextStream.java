package gemma4.mtp;

/**
 * Ids in, final text out: the pieces make up exactly what the ids decode to. A run of byte tokens is held back until it
 * ends, for one invalid byte makes replacement characters of the whole run. So a character split over tokens comes
 * whole.
 */
public final class TextStream {
    private final Tokenizer tokenizer;
    private final IntList held = new IntList(); // a run of byte tokens

    public TextStream(Tokenizer tokenizer) {
        this.tokenizer = tokenizer;
    }

    /** The text that these ids complete, maybe none. */
    public String push(int[] ids) {
        IntList done = new IntList();
        for (int id : ids) {
            if (tokenizer.isSkipped(id)) {
                continue;
            }
            held.add(id);
            if (tokenizer.byteOf(id) < 0) {
                for (int token : held.toArray()) {
                    done.add(token);
                }
                held.cut(0);
            }
        }
        return tokenizer.decode(done.toArray());
    }

    /** What is held back, as it decodes; an incomplete character gives replacement characters. */
    public String flush() {
        String text = tokenizer.decode(held.toArray());
        held.cut(0);
        return text;
    }
}
