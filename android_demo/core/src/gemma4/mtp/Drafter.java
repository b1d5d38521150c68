package gemma4.mtp;

/** Drafts tokens from the target's committed KV rows; it keeps no cache of its own. */
public interface Drafter {
    /** `count` tokens after the pending `token`. hidden [H]: the target's post-norm row that produced it. */
    int[] draft(KvCache cache, int token, float[] hidden, int count);
}
