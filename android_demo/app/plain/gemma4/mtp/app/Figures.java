package gemma4.mtp.app;

import gemma4.mtp.Round;
import gemma4.mtp.Stats;
import java.util.List;

/** How a reply goes, so far: what the live line shows. */
public final class Figures {
    /** From the first token on; 0 where there are too few to tell. */
    public final double tokensPerSecond;
    public final double firstTokenS;
    /** Of the drafts that were verified, 0 where there were none. */
    public final double acceptance;
    /** Whether any draft was verified. */
    public final boolean drafts;
    /** Of the last block; 0 is plain decoding. */
    public final int draftLength;
    public final long residentBytes;
    /** Why nothing is drafted, or null. */
    public final String offReason;

    /** rounds: the first of them gave the first token. */
    Figures(List<Round> rounds, double firstTokenS, double decodeS, long residentBytes, String offReason) {
        int tokens = 0;
        for (Round round : rounds) {
            tokens += round.tokens.length;
        }
        Stats stats = new Stats(rounds);
        tokensPerSecond = tokens > 1 && decodeS > 0 ? (tokens - 1) / decodeS : 0;
        drafts = stats.drafted > 0;
        acceptance = stats.drafted > 0 ? stats.accepted / (double) stats.drafted : 0;
        draftLength = rounds.isEmpty() ? 0 : rounds.get(rounds.size() - 1).drafted;
        this.firstTokenS = firstTokenS;
        this.residentBytes = residentBytes;
        this.offReason = offReason;
    }
}
