import java.io.ByteArrayOutputStream;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.util.zip.ZipEntry;
import java.util.zip.ZipInputStream;
import java.util.zip.ZipOutputStream;
import org.objectweb.asm.ClassReader;
import org.objectweb.asm.ClassWriter;
import org.objectweb.asm.Opcodes;
import org.objectweb.asm.tree.AbstractInsnNode;
import org.objectweb.asm.tree.ClassNode;
import org.objectweb.asm.tree.InvokeDynamicInsnNode;
import org.objectweb.asm.tree.MethodNode;

/**
 * Classes of a newer Java in the form of Java 8, which is all that dx reads: java Lower IN.jar OUT.jar PREFIX...
 * Classes whose path begins with a PREFIX are left out.
 *
 * Since Java 11 classes within each other reach private members directly, and private methods are called as virtual
 * ones. An older machine allows neither, so private members become package-private. A method with a lambda, which
 * Android's runtime cannot make, is left out: in the library that this is for, that is one text for debugging and the
 * options of other processors.
 */
public final class Lower {
    private Lower() {}

    public static void main(String[] arguments) throws IOException {
        try (ZipInputStream in = new ZipInputStream(new FileInputStream(arguments[0]));
            ZipOutputStream out = new ZipOutputStream(new FileOutputStream(arguments[1]))) {
            for (ZipEntry entry = in.getNextEntry(); entry != null; entry = in.getNextEntry()) {
                boolean left = entry.getName().contains("module-info");
                for (int i = 2; i < arguments.length; i++) {
                    left |= entry.getName().startsWith(arguments[i]);
                }
                if (entry.getName().endsWith(".class") && !left) {
                    ZipEntry lowered = new ZipEntry(entry.getName());
                    lowered.setTime(0); // so that the same library gives the same bytes
                    out.putNextEntry(lowered);
                    out.write(lower(read(in)));
                }
            }
        }
    }

    private static byte[] lower(byte[] code) {
        ClassNode found = new ClassNode();
        new ClassReader(code).accept(found, 0);
        found.version = Math.min(found.version, Opcodes.V1_8);
        found.nestHostClass = null;
        found.nestMembers = null;
        found.methods.removeIf(Lower::hasLambda);
        found.methods.forEach(method -> method.access &= ~Opcodes.ACC_PRIVATE);
        found.fields.forEach(field -> field.access &= ~Opcodes.ACC_PRIVATE);
        ClassWriter writer = new ClassWriter(0);
        found.accept(writer);
        return writer.toByteArray();
    }

    private static boolean hasLambda(MethodNode method) {
        for (AbstractInsnNode instruction : method.instructions) {
            if (instruction instanceof InvokeDynamicInsnNode) {
                return true;
            }
        }
        return false;
    }

    private static byte[] read(InputStream in) throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        byte[] block = new byte[1 << 14];
        for (int n = in.read(block); n > 0; n = in.read(block)) {
            bytes.write(block, 0, n);
        }
        return bytes.toByteArray();
    }
}
