package gemma4.mtp;

import java.util.Arrays;
import java.util.List;

/** Who drafts and how many tokens. Drafters: "mtp", the bundle's, and "ngram", lookup in the text so far. */
public final class DraftPolicy {
    public static final List<String> DRAFTERS = Arrays.asList("mtp", "ngram");

    public final List<String> drafters;
    final int numTokens;
    final boolean heuristic;
    /** What was learned, from text to text; null where the number is fixed. */
    public final Costs costs;

    private DraftPolicy(int numTokens, boolean heuristic, Costs costs, List<String> drafters) {
        this.numTokens = numTokens;
        this.heuristic = heuristic;
        this.costs = costs;
        this.drafters = drafters;
    }

    /** numTokens at first; "heuristic" then adds 2 when all were accepted, else takes 1 off; "constant" keeps it. */
    public static DraftPolicy fixed(int numTokens, String schedule, String drafter) {
        if (numTokens < 0 || numTokens > Costs.MAX_DRAFT_TOKENS) {
            throw new ValueError("draft tokens " + numTokens + " is outside 0.." + Costs.MAX_DRAFT_TOKENS);
        }
        return new DraftPolicy(numTokens, schedule.equals("heuristic"), null, Arrays.asList(drafter));
    }

    /** The source and number that are expected to be fastest, none included. */
    public static DraftPolicy auto(String... drafters) {
        return new DraftPolicy(0, false, new Costs(), Arrays.asList(drafters));
    }

    /** Why the bundle's drafter does not draft now, if it could; else null. */
    public String offReason() {
        return costs != null && drafters.contains("mtp") ? costs.explain("mtp") : null;
    }

    int nextLength(int length, int drafted, int accepted) {
        if (!heuristic || drafted == 0) {
            return length;
        }
        return accepted == drafted ? Math.min(length + 2, Costs.MAX_DRAFT_TOKENS) : Math.max(1, length - 1);
    }
}
