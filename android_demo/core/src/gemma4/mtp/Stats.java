package gemma4.mtp;

import java.util.ArrayList;
import java.util.List;

/** Counts over the rounds of a reply that verified a block. */
public final class Stats {
    public final int rounds;
    public final int drafted;
    public final int accepted;
    /** Drafts at place i of their block, and how many of them are in the text. */
    public final int[] draftedAt;
    public final int[] acceptedAt;

    public Stats(List<Round> all) {
        List<Round> blocks = new ArrayList<>();
        int places = 0;
        for (Round round : all) {
            if (round.drafted > 0) {
                blocks.add(round);
                places = Math.max(places, round.drafted);
            }
        }
        rounds = blocks.size();
        draftedAt = new int[places];
        acceptedAt = new int[places];
        int draftedSum = 0;
        int acceptedSum = 0;
        for (Round round : blocks) {
            draftedSum += round.drafted;
            acceptedSum += round.accepted;
            for (int i = 0; i < round.drafted; i++) {
                draftedAt[i]++;
                acceptedAt[i] += round.accepted > i ? 1 : 0;
            }
        }
        drafted = draftedSum;
        accepted = acceptedSum;
    }
}
