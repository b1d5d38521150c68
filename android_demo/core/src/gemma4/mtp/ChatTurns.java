package gemma4.mtp;

import gemma4.mtp.Specs.ChatSpec;
import java.util.List;

/**
 * A conversation as the text that the model is to continue: what the checkpoint's template gives, from the pieces that
 * the exporter cut out of it (export/chat_turns.py).
 */
public final class ChatTurns {
    public static final String SYSTEM = "system";
    public static final String USER = "user";
    public static final String ASSISTANT = "assistant";

    private final ChatSpec spec;

    /** One text of a conversation; an assistant's without the model's own markup. */
    public static final class Message {
        final String role;
        final String text;

        public Message(String role, String text) {
            this.role = role;
            this.text = text;
        }
    }

    /** spec: the manifest's; ValueError where it has none. */
    public ChatTurns(ChatSpec spec) {
        if (spec == null) {
            throw new ValueError("the checkpoint's chat template cannot be used here; use a raw prompt");
        }
        this.spec = spec;
    }

    public boolean takesSystem() {
        return spec.systemStart != null;
    }

    /** Maybe a system text, then questions and answers in turns, a question last. It begins with bos. */
    public String render(List<Message> messages) {
        StringBuilder text = new StringBuilder();
        String before = spec.start;
        String expected = USER;
        for (Message message : messages) {
            boolean system = message.role.equals(SYSTEM) && message == messages.get(0) && takesSystem();
            if (!system && !message.role.equals(expected)) {
                throw new ValueError("a text of the " + message.role + " stands where one of the " + expected
                    + " is to be; give questions and answers in turns");
            }
            text.append(system ? spec.systemStart : before);
            text.append(spec.stripped.contains(message.role) ? strip(message.text) : message.text);
            before = system ? spec.systemEnd : message.role.equals(USER) ? spec.userEnd : spec.answerEnd;
            expected = message.role.equals(USER) ? ASSISTANT : USER;
        }
        if (!expected.equals(ASSISTANT)) {
            throw new ValueError("there is no question to answer; give one");
        }
        return text.append(spec.prompt).toString();
    }

    /** Without white space around it, which is what Python's str.strip takes. */
    private static String strip(String text) {
        int first = 0;
        int end = text.length();
        while (first < end && isSpace(text.charAt(first))) {
            first++;
        }
        while (end > first && isSpace(text.charAt(end - 1))) {
            end--;
        }
        return text.substring(first, end);
    }

    private static boolean isSpace(char character) {
        return (character >= '\t' && character <= '\r') || (character >= 0x1c && character <= ' ') || character == 0x85
            || (Character.getType(character) == Character.SPACE_SEPARATOR && character != 0x180e) || character == 0x2028
            || character == 0x2029;
    }
}
