package gemma4.mtp;

import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/** The most recent place of every run of 2 to 4 ids of one text, which only grows: drafts without a model. */
final class NgramIndex {
    private static final int MIN_TOKENS = 2;
    private static final int MAX_TOKENS = 4;

    /** The last `tokens` ids of a text of `length` ids also stand right before `position`. */
    static final class Match {
        final int tokens;
        private final int position;
        private final int length;

        private Match(int tokens, int position, int length) {
            this.tokens = tokens;
            this.position = position;
            this.length = length;
        }

        /** `count` tokens after the first `length` of ids; what repeats up to the text's end goes on repeating. */
        int[] drafts(IntList ids, int count) {
            int[] drafts = new int[count];
            for (int i = 0; i < count; i++) {
                drafts[i] = ids.get(position + i % (length - position));
            }
            return drafts;
        }
    }

    private static final class Run {
        private final int[] ids;

        private Run(int[] ids) {
            this.ids = ids;
        }

        @Override
        public boolean equals(Object other) {
            return other instanceof Run && Arrays.equals(ids, ((Run) other).ids);
        }

        @Override
        public int hashCode() {
            return Arrays.hashCode(ids);
        }
    }

    private final Map<Run, Integer> after = new HashMap<>(); // run of ids -> position of the token after it
    private int covered; // tokens whose preceding runs are in the index

    /** The longest suffix of ids that has a token after it elsewhere, or null. */
    Match match(IntList ids) {
        for (int end = covered; end < ids.size(); end++) {
            for (int tokens = MIN_TOKENS; tokens <= Math.min(MAX_TOKENS, end); tokens++) {
                after.put(new Run(ids.slice(end - tokens, end)), end);
            }
        }
        covered = ids.size();
        for (int tokens = Math.min(MAX_TOKENS, ids.size()); tokens >= MIN_TOKENS; tokens--) {
            Integer position = after.get(new Run(ids.slice(ids.size() - tokens, ids.size())));
            if (position != null) {
                return new Match(tokens, position, ids.size());
            }
        }
        return null;
    }
}
