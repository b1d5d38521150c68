import java.io.IOException;
import java.io.InputStream;
import java.util.ArrayList;
import java.util.Enumeration;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.zip.ZipEntry;
import java.util.zip.ZipFile;
import java.util.zip.ZipOutputStream;
import org.objectweb.asm.ClassReader;
import org.objectweb.asm.ClassWriter;
import org.objectweb.asm.Handle;
import org.objectweb.asm.Opcodes;
import org.objectweb.asm.Type;
import org.objectweb.asm.tree.AbstractInsnNode;
import org.objectweb.asm.tree.ClassNode;
import org.objectweb.asm.tree.FieldInsnNode;
import org.objectweb.asm.tree.FieldNode;
import org.objectweb.asm.tree.InsnNode;
import org.objectweb.asm.tree.InvokeDynamicInsnNode;
import org.objectweb.asm.tree.MethodInsnNode;
import org.objectweb.asm.tree.MethodNode;
import org.objectweb.asm.tree.TypeInsnNode;
import org.objectweb.asm.tree.VarInsnNode;

/**
 * onnxruntime's classes, compiled for Java 17, as Java 8, which dx takes: Desugar IN.jar OUT.jar [PREFIX_LEFT_OUT ...]
 *
 * Three things differ. Private members that other classes of a nest use get package access; calls of one's own private
 * methods are invokespecial; a lambda without captures, the only kind there is, becomes a class. What it cannot
 * rewrite ends the program.
 */
final class Desugar {
    private final Map<String, ClassNode> classes = new TreeMap<>();
    private final List<ClassNode> lambdas = new ArrayList<>();

    private Desugar() {}

    public static void main(String[] arguments) throws IOException {
        Desugar desugar = new Desugar();
        try (ZipFile jar = new ZipFile(arguments[0])) {
            desugar.read(jar, List.of(arguments).subList(2, arguments.length));
        }
        desugar.rewrite();
        try (ZipOutputStream out = new ZipOutputStream(new java.io.FileOutputStream(arguments[1]))) {
            desugar.write(out);
        }
    }

    private void read(ZipFile jar, List<String> leftOut) throws IOException {
        for (Enumeration<? extends ZipEntry> entries = jar.entries(); entries.hasMoreElements();) {
            ZipEntry entry = entries.nextElement();
            if (entry.getName().endsWith(".class") && leftOut.stream().noneMatch(entry.getName()::startsWith)) {
                ClassNode node = new ClassNode();
                try (InputStream in = jar.getInputStream(entry)) {
                    new ClassReader(in).accept(node, 0);
                }
                classes.put(node.name, node);
            }
        }
    }

    private void rewrite() {
        for (ClassNode node : classes.values()) {
            for (MethodNode method : node.methods) {
                for (AbstractInsnNode code : method.instructions.toArray()) {
                    if (code instanceof InvokeDynamicInsnNode) {
                        replaceLambda(node, method, (InvokeDynamicInsnNode) code);
                    }
                }
            }
        }
        for (ClassNode lambda : lambdas) {
            classes.put(lambda.name, lambda);
        }
        Set<String> shared = usedByOthers();
        for (ClassNode node : classes.values()) {
            node.version = Opcodes.V1_8;
            node.nestHostClass = null;
            node.nestMembers = null;
            for (FieldNode field : node.fields) {
                if (shared.contains(key(node.name, field.name, field.desc))) {
                    field.access &= ~Opcodes.ACC_PRIVATE;
                }
            }
            for (MethodNode method : node.methods) {
                if (isPrivate(method) && shared.contains(key(node.name, method.name, method.desc))) {
                    checkNobodyOverrides(node, method);
                    method.access &= ~Opcodes.ACC_PRIVATE;
                }
            }
        }
        classes.values().forEach(this::callPrivateMethodsDirectly);
    }

    private static String key(String owner, String name, String desc) {
        return owner + "." + name + ":" + desc;
    }

    private static boolean isPrivate(MethodNode method) {
        return (method.access & Opcodes.ACC_PRIVATE) != 0;
    }

    private Set<String> usedByOthers() {
        Set<String> used = new HashSet<>();
        for (ClassNode node : classes.values()) {
            for (MethodNode method : node.methods) {
                for (AbstractInsnNode code : method.instructions.toArray()) {
                    if (code instanceof MethodInsnNode && !((MethodInsnNode) code).owner.equals(node.name)) {
                        MethodInsnNode call = (MethodInsnNode) code;
                        used.add(key(call.owner, call.name, call.desc));
                    } else if (code instanceof FieldInsnNode && !((FieldInsnNode) code).owner.equals(node.name)) {
                        FieldInsnNode access = (FieldInsnNode) code;
                        used.add(key(access.owner, access.name, access.desc));
                    }
                }
            }
        }
        return used;
    }

    /** With package access it could be overridden, which a private method never is. */
    private void checkNobodyOverrides(ClassNode owner, MethodNode method) {
        if (method.name.equals("<init>") || (method.access & Opcodes.ACC_STATIC) != 0) {
            return;
        }
        for (ClassNode other : classes.values()) {
            boolean same = other.methods.stream().anyMatch(m -> m.name.equals(method.name) && m.desc.equals(method.desc));
            if (other != owner && same) {
                throw new IllegalStateException(
                    key(owner.name, method.name, method.desc) + ": " + other.name + " has a method of that name too");
            }
        }
    }

    private void callPrivateMethodsDirectly(ClassNode node) {
        Set<String> own = new HashSet<>();
        for (MethodNode method : node.methods) {
            if (isPrivate(method)) {
                own.add(key(node.name, method.name, method.desc));
            }
        }
        for (MethodNode method : node.methods) {
            for (AbstractInsnNode code : method.instructions.toArray()) {
                boolean virtual =
                    code.getOpcode() == Opcodes.INVOKEVIRTUAL || code.getOpcode() == Opcodes.INVOKEINTERFACE;
                if (virtual) {
                    MethodInsnNode call = (MethodInsnNode) code;
                    if (own.contains(key(call.owner, call.name, call.desc))) {
                        call.setOpcode(Opcodes.INVOKESPECIAL);
                    }
                }
            }
        }
    }

    private void replaceLambda(ClassNode node, MethodNode method, InvokeDynamicInsnNode call) {
        Handle body = call.bsmArgs.length == 3 ? (Handle) call.bsmArgs[1] : null;
        if (!call.bsm.getOwner().equals("java/lang/invoke/LambdaMetafactory") || body == null
            || body.getTag() != Opcodes.H_INVOKESTATIC || Type.getArgumentTypes(call.desc).length > 0) {
            throw new IllegalStateException(node.name + "." + method.name + ": no lambda without captures");
        }
        String name = node.name + "$$Lambda" + lambdas.size();
        lambdas.add(lambdaClass(name, call, body));
        method.instructions.set(call, new FieldInsnNode(Opcodes.GETSTATIC, name, "INSTANCE", "L" + name + ";"));
    }

    private static ClassNode lambdaClass(String name, InvokeDynamicInsnNode call, Handle body) {
        ClassNode node = new ClassNode();
        node.version = Opcodes.V1_8;
        node.access = Opcodes.ACC_FINAL | Opcodes.ACC_SYNTHETIC | Opcodes.ACC_SUPER;
        node.name = name;
        node.superName = "java/lang/Object";
        node.interfaces.add(Type.getReturnType(call.desc).getInternalName());
        node.fields.add(new FieldNode(Opcodes.ACC_STATIC | Opcodes.ACC_FINAL, "INSTANCE", "L" + name + ";", null, null));

        MethodNode constructor = new MethodNode(0, "<init>", "()V", null, null);
        constructor.instructions.add(new VarInsnNode(Opcodes.ALOAD, 0));
        constructor.instructions.add(
            new MethodInsnNode(Opcodes.INVOKESPECIAL, "java/lang/Object", "<init>", "()V", false));
        constructor.instructions.add(new InsnNode(Opcodes.RETURN));
        node.methods.add(constructor);

        MethodNode initializer = new MethodNode(Opcodes.ACC_STATIC, "<clinit>", "()V", null, null);
        initializer.instructions.add(new TypeInsnNode(Opcodes.NEW, name));
        initializer.instructions.add(new InsnNode(Opcodes.DUP));
        initializer.instructions.add(new MethodInsnNode(Opcodes.INVOKESPECIAL, name, "<init>", "()V", false));
        initializer.instructions.add(new FieldInsnNode(Opcodes.PUTSTATIC, name, "INSTANCE", "L" + name + ";"));
        initializer.instructions.add(new InsnNode(Opcodes.RETURN));
        node.methods.add(initializer);

        Type erased = (Type) call.bsmArgs[0];
        Type[] taken = ((Type) call.bsmArgs[2]).getArgumentTypes();
        MethodNode apply = new MethodNode(Opcodes.ACC_PUBLIC, call.name, erased.getDescriptor(), null, null);
        int slot = 1;
        for (Type type : taken) {
            apply.instructions.add(new VarInsnNode(type.getOpcode(Opcodes.ILOAD), slot));
            if (type.getSort() == Type.OBJECT || type.getSort() == Type.ARRAY) {
                apply.instructions.add(new TypeInsnNode(Opcodes.CHECKCAST, type.getInternalName()));
            }
            slot += type.getSize();
        }
        apply.instructions.add(
            new MethodInsnNode(Opcodes.INVOKESTATIC, body.getOwner(), body.getName(), body.getDesc(), false));
        apply.instructions.add(new InsnNode(erased.getReturnType().getOpcode(Opcodes.IRETURN)));
        node.methods.add(apply);
        return node;
    }

    private void write(ZipOutputStream out) throws IOException {
        for (ClassNode node : classes.values()) {
            ClassWriter writer = new ClassWriter(ClassWriter.COMPUTE_MAXS);
            node.accept(writer);
            out.putNextEntry(new ZipEntry(node.name + ".class"));
            out.write(writer.toByteArray());
        }
    }
}
