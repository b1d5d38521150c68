package gemma4.mtp;

/** The target as the loop sees it: token ids in, logits, hidden rows and new KV rows out. */
public interface Target {
    int vocabSize();

    /** The most rows that its graphs take. */
    int maxContextTokens();

    /** marginRows as for KvCache. */
    KvCache newCache(int maxContextTokens, int marginRows);

    /** Run tokens that follow the committed rows; nothing is committed. At most cache.room() tokens. */
    Output forward(KvCache cache, int[] ids, boolean lastRowOnly);

    /** Run and commit tokens whose logits nobody asks for. */
    void append(KvCache cache, int[] ids);

    /**
     * logits [R, V] and hidden [R, H] (after the final norm) of the asked rows; new KV rows [T, kv, D] of every layer.
     */
    final class Output {
        final Tensor logits;
        final Tensor hidden;
        final Tensor[] newK;
        final Tensor[] newV;

        public Output(Tensor logits, Tensor hidden, Tensor[] newK, Tensor[] newV) {
            this.logits = logits;
            this.hidden = hidden;
            this.newK = newK;
            this.newV = newV;
        }
    }
}
