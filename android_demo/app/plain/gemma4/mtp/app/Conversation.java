package gemma4.mtp.app;

import gemma4.mtp.ChatTurns;
import gemma4.mtp.Pair;
import java.util.ArrayList;
import java.util.List;

/**
 * What was said, as the token ids that the model is to continue: turns of the checkpoint's own template, or, where that
 * cannot be had here, one raw text that grows.
 */
final class Conversation {
    private final Pair pair;
    private final ChatTurns turns; // null: raw
    private final List<ChatTurns.Message> messages = new ArrayList<>();
    private int[] text = {}; // raw: all ids so far

    Conversation(Pair pair) {
        this.pair = pair;
        turns = pair.manifest.chat == null ? null : new ChatTurns(pair.manifest.chat);
    }

    boolean chats() {
        return turns != null;
    }

    /** Ids of everything with this message at the end. ValueError if they cannot be made. */
    int[] prompt(String message) {
        if (turns != null) {
            List<ChatTurns.Message> asked = new ArrayList<>(messages);
            asked.add(new ChatTurns.Message(ChatTurns.USER, message));
            return pair.tokenizer.encode(turns.render(asked));
        }
        return text.length == 0 ? pair.tokenizer.encodePrompt(message, pair.manifest.tokens.bos)
                                : join(text, pair.tokenizer.encode(message));
    }

    /** The message has been answered. */
    void answered(String message, int[] prompt, int[] reply, String replyText) {
        messages.add(new ChatTurns.Message(ChatTurns.USER, message));
        messages.add(new ChatTurns.Message(ChatTurns.ASSISTANT, replyText));
        text = join(prompt, reply);
    }

    void clear() {
        messages.clear();
        text = new int[0];
    }

    private static int[] join(int[] first, int[] second) {
        int[] both = new int[first.length + second.length];
        System.arraycopy(first, 0, both, 0, first.length);
        System.arraycopy(second, 0, both, first.length, second.length);
        return both;
    }
}
