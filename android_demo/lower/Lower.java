import java.io.ByteArrayOutputStream;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.util.zip.ZipEntry;
import java.util.zip.ZipInputStream;
import java.util.zip.ZipOutputStream;
import org.objectweb.asm.ClassReader;
import org.objectweb.asm.ClassVisitor;
import org.objectweb.asm.ClassWriter;
import org.objectweb.asm.FieldVisitor;
import org.objectweb.asm.MethodVisitor;
import org.objectweb.asm.Opcodes;

/**
 * Classes of a newer Java in the form of Java 8, which is all that dx reads: java Lower IN.jar OUT.jar PREFIX...
 * Classes whose path begins with a PREFIX are left out.
 *
 * Since Java 11 classes within each other reach private members directly, and private methods are called as virtual
 * ones. An older machine allows neither, so private members become package-private. What else is newer (lambdas, which
 * Android's runtime cannot make) stays, and fails where it is run: in the library that this is for, only texts for
 * debugging and options of other devices have any, and the app uses neither.
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
        ClassWriter writer = new ClassWriter(0);
        new ClassReader(code).accept(new ClassVisitor(Opcodes.ASM9, writer) {
            @Override
            public void visit(
                int version, int access, String name, String signature, String parent, String[] interfaces) {
                super.visit(Math.min(version, Opcodes.V1_8), access, name, signature, parent, interfaces);
            }

            @Override
            public void visitNestHost(String host) {}

            @Override
            public void visitNestMember(String member) {}

            @Override
            public FieldVisitor visitField(int access, String name, String type, String signature, Object value) {
                return super.visitField(access & ~Opcodes.ACC_PRIVATE, name, type, signature, value);
            }

            @Override
            public MethodVisitor visitMethod(int access, String name, String type, String signature, String[] thrown) {
                return super.visitMethod(access & ~Opcodes.ACC_PRIVATE, name, type, signature, thrown);
            }
        }, 0);
        return writer.toByteArray();
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
