package gemma4.mtp;

import gemma4.mtp.Specs.TokensSpec;

/**
 * The one loop: draft -> verify -> accept, batch size 1. Plain decoding is the same loop with zero drafts.
 *
 * Invariant between rounds: the cache holds every token of `ids` but the last (pending) one, which the target chose and
 * has not yet run. A round runs [pending, d1..dK] through the target once, accepts the longest prefix of drafts that
 * the target agrees with, takes the target's own next token, and commits the rows of pending and the accepted drafts.
 * A caller may stop after any round: ids and cache agree.
 */
final class Speculative {
    private final Target target;
    private final KvCache cache;
    private final IntList ids;
    private final long[] eos;
    private final Sampler sampler;
    private final Drafting drafting;
    private final String limit;
    private int budget;
    private float[] hidden; // of the row that produced the pending token; null before the prefill
    private boolean finished;

    /**
     * Continue `ids`, which grows in place, by exactly maxNewTokens or less if a text ends. The ids may begin with
     * rows that the cache holds. ValueError if they cannot be continued.
     */
    Speculative(Target target, Drafter drafter, KvCache cache, IntList ids, int maxNewTokens, TokensSpec tokens,
        DraftPolicy policy, Sampling sampling, Clock clock) {
        checkRequest(target, cache, ids, maxNewTokens, cache.length());
        this.target = target;
        this.cache = cache;
        this.ids = ids;
        eos = tokens.eos;
        sampler = new Sampler(sampling, target.vocabSize());
        drafting = new Drafting(policy, drafter, clock);
        int room = cache.maxContextTokens - ids.size();
        budget = Math.min(room, maxNewTokens);
        limit = room < maxNewTokens ? "context" : "length";
    }

    /** ValueError if ids, of which the cache is to hold the first `held`, cannot be continued. */
    static void checkRequest(Target target, KvCache cache, IntList ids, int maxNewTokens, int held) {
        if (maxNewTokens < 1) {
            throw new ValueError("max_new_tokens is " + maxNewTokens + "; it must be at least 1");
        }
        if (ids.size() <= held) {
            throw new ValueError(
                "no token to run: the cache holds all " + ids.size() + " of the prompt; add at least one");
        }
        if (ids.size() > cache.maxContextTokens) {
            throw new ValueError("the prompt has " + ids.size() + " tokens, the context holds " + cache.maxContextTokens
                + "; shorten the prompt");
        }
        for (int i = held; i < ids.size(); i++) {
            if (ids.get(i) < 0 || ids.get(i) >= target.vocabSize()) {
                throw new ValueError("token id " + ids.get(i) + " is outside 0.." + (target.vocabSize() - 1)
                    + "; use the bundle's own tokenizer");
            }
        }
    }

    /** Run and commit one chunk of ids that one call cannot finish; whether there was one. */
    static boolean prefillChunk(Target target, KvCache cache, IntList ids) {
        if (ids.size() - cache.length() <= cache.room()) {
            return false;
        }
        target.append(cache, ids.slice(cache.length(), cache.length() + cache.room()));
        return true;
    }

    /** The next round, or null after the last one. */
    Round next() {
        if (finished) {
            return null;
        }
        if (budget == 0) {
            finished = true;
            return new Round(new int[0], 0, 0, "context", null);
        }
        return hidden == null ? prefill() : verify();
    }

    private Round prefill() {
        while (prefillChunk(target, cache, ids)) {
            continue;
        }
        int[] rest = ids.slice(cache.length(), ids.size());
        Target.Output output = target.forward(cache, rest, true);
        cache.commit(output.newK, output.newV, rest.length);
        hidden = output.hidden.row(0);
        int[] counts = accept(new int[0], output.logits);
        return finish(counts[0], 0, 0, null);
    }

    private Round verify() {
        int[] drafts = drafting.propose(cache, ids, hidden, Math.min(budget, cache.room()) - 1);
        int[] block = new int[drafts.length + 1];
        block[0] = ids.last();
        System.arraycopy(drafts, 0, block, 1, drafts.length);
        Target.Output output = target.forward(cache, block, false);
        int[] counts = accept(drafts, output.logits);
        cache.commit(output.newK, output.newV, counts[1] + 1);
        hidden = output.hidden.row(counts[1]);
        String by = drafting.settle(ids, counts[0], counts[1]);
        return finish(counts[0], drafts.length, counts[1], by);
    }

    private Round finish(int added, int drafted, int accepted, String by) {
        budget -= added;
        boolean stops = isEos(ids.last());
        if (stops && cache.length() < ids.size()) {
            target.append(cache, ids.slice(cache.length(), ids.size())); // so that a next turn sees the end of this one
        }
        String reason = stops ? "stop" : budget == 0 ? limit : null;
        finished = reason != null;
        return new Round(ids.slice(ids.size() - added, ids.size()), drafted, accepted, reason, by);
    }

    /**
     * Append the target's tokens to ids while they are the drafts d1..dK, and the first that is not or comes after
     * all. logits [K+1, V] of [pending, d1..dK] -> how many tokens were added, how many of them are drafts. The text
     * ends at a stop token wherever it stands in the block. ids stay as they were if no token can be chosen.
     */
    private int[] accept(int[] drafts, Tensor logits) {
        int start = ids.size();
        try {
            for (int accepted = 0;; accepted++) {
                ids.add(sampler.choose(ids, logits.row(accepted)));
                if (accepted == drafts.length || ids.last() != drafts[accepted]) {
                    return new int[] {accepted + 1, accepted};
                }
                if (isEos(ids.last())) {
                    return new int[] {accepted + 1, accepted + 1};
                }
            }
        } catch (ValueError error) {
            ids.cut(start);
            throw error;
        }
    }

    private boolean isEos(int token) {
        for (long id : eos) {
            if (id == token) {
                return true;
            }
        }
        return false;
    }
}
