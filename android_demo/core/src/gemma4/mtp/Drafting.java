package gemma4.mtp;

import java.util.LinkedHashMap;
import java.util.Map;

/**
 * The drafts of one text with their measured times. Each round: `propose`, the caller verifies and commits, `settle`.
 */
final class Drafting {
    private static final int[] NONE = {};

    private final DraftPolicy policy;
    private final Drafter drafter;
    private final NgramIndex index;
    private final Clock clock;
    private int length; // of the next block where the number is fixed
    private NgramIndex.Match match;
    private Costs.Plan plan = Costs.Plan.PLAIN;
    private int[] drafts = NONE;
    private double started;
    private double drafted;

    /** drafter null: only lookup can draft. */
    Drafting(DraftPolicy policy, Drafter drafter, Clock clock) {
        this.policy = policy;
        this.drafter = policy.drafters.contains("mtp") ? drafter : null;
        this.index = policy.drafters.contains("ngram") ? new NgramIndex() : null;
        this.clock = clock;
        length = policy.numTokens;
    }

    /** At most `limit` drafts after ids. hidden [H]: the target's post-norm row that produced the last id. */
    int[] propose(KvCache cache, IntList ids, float[] hidden, int limit) {
        started = clock.seconds();
        match = index == null ? null : index.match(ids);
        plan = plan(offers(Math.min(limit, Costs.MAX_DRAFT_TOKENS)));
        if (plan.count == 0) {
            drafts = NONE;
        } else if (plan.source.equals("mtp")) {
            drafts = drafter.draft(cache, ids.last(), hidden, plan.count);
        } else {
            drafts = match.drafts(ids, plan.count);
        }
        drafted = clock.seconds();
        return drafts;
    }

    private Map<String, Integer> offers(int limit) {
        Map<String, Integer> offers = new LinkedHashMap<>();
        if (limit >= 1 && drafter != null) {
            offers.put("mtp", limit);
        }
        if (limit >= 1 && match != null) {
            offers.put("ngram" + match.tokens, limit);
        }
        return offers;
    }

    /** A fixed number takes the first source offered. */
    private Costs.Plan plan(Map<String, Integer> offers) {
        if (policy.costs != null) {
            return policy.costs.decide(offers);
        }
        for (Map.Entry<String, Integer> offer : offers.entrySet()) {
            return new Costs.Plan(offer.getKey(), Math.min(length, offer.getValue()), false, 0);
        }
        return Costs.Plan.PLAIN;
    }

    /** ids: with the `added` tokens of the round -> the drafter of its drafts, if there were any. */
    String settle(IntList ids, int added, int accepted) {
        Costs.Trial trial = new Costs.Trial();
        trial.verifyS = clock.seconds() - drafted;
        trial.draftS = drafted - started;
        trial.plan = plan;
        trial.drafted = drafts.length;
        trial.accepted = accepted;
        trial.tokens = added;
        int[] fresh = ids.slice(ids.size() - added, ids.size());
        if ("mtp".equals(plan.source)) {
            trial.agreed.put("mtp", agreement(drafts, fresh));
        }
        if (match != null) {
            trial.agreed.put("ngram" + match.tokens, agreement(match.drafts(ids, added), fresh));
        }
        if (policy.costs != null) {
            policy.costs.learn(trial);
        } else {
            length = policy.nextLength(length, drafts.length, accepted);
        }
        return drafts.length == 0 ? null : plan.source.equals("mtp") ? "mtp" : "ngram";
    }

    /** How many drafts agree with the new tokens before the first that does not, and how many were compared. */
    private static int[] agreement(int[] drafts, int[] added) {
        int compared = Math.min(drafts.length, added.length);
        for (int i = 0; i < compared; i++) {
            if (drafts[i] != added[i]) {
                return new int[] {i, i + 1};
            }
        }
        return new int[] {compared, compared};
    }
}
