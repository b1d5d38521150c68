package gemma4.mtp;

/**
 * Tokens that one target call added to the text. drafted, accepted: drafts in its block, drafts that are in the text.
 * stopReason: set in the last round, "stop", "length", "context" or "cancelled". drafter: "mtp" or "ngram", or null.
 */
public final class Round {
    public final int[] tokens;
    public final int drafted;
    public final int accepted;
    public final String stopReason;
    public final String drafter;

    Round(int[] tokens, int drafted, int accepted, String stopReason, String drafter) {
        this.tokens = tokens;
        this.drafted = drafted;
        this.accepted = accepted;
        this.stopReason = stopReason;
        this.drafter = drafter;
    }

    Round stopped(String reason) {
        return new Round(tokens, drafted, accepted, reason, drafter);
    }
}
