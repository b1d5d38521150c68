package gemma4.mtp.app;

import android.app.AlertDialog;
import android.content.ActivityNotFoundException;
import android.content.DialogInterface;
import android.content.Intent;
import android.os.Bundle;
import android.view.View;
import android.widget.Button;
import android.widget.LinearLayout;
import android.widget.TextView;
import gemma4.mtp.Memory;
import java.io.File;
import java.util.Collections;
import java.util.List;

/** The bundles that there are: load one, delete one, bring one in. */
public final class BundlesActivity extends EngineActivity {
    private static final int PICK = 1;

    private LinearLayout list;

    @Override
    int layout() {
        return R.layout.bundles;
    }

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        list = (LinearLayout) findViewById(R.id.list);
        TextView push = (TextView) findViewById(R.id.push);
        push.setVisibility(app().pushRoot() == null ? View.GONE : View.VISIBLE);
        push.setText(getString(R.string.push, app().pushRoot()));
        findViewById(R.id.pick).setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                pickOrStop();
            }
        });
    }

    private void pickOrStop() {
        if (engine().busy()) {
            engine().stop();
            return;
        }
        try {
            startActivityForResult(new Intent(Intent.ACTION_OPEN_DOCUMENT_TREE), PICK);
        } catch (ActivityNotFoundException error) {
            note(getString(R.string.no_picker));
        }
    }

    @Override
    protected void onActivityResult(int request, int result, Intent data) {
        if (request == PICK && result == RESULT_OK && data != null && data.getData() != null) {
            File root = app().importRoot();
            engine().importBundle(new FolderSource(getContentResolver(), data.getData()), root, app().settings());
        }
    }

    @Override
    public void changed() {
        boolean busy = engine().busy();
        ((Button) findViewById(R.id.pick)).setText(busy ? R.string.stop : R.string.import_folder);
        list.removeAllViews();
        List<File> bundles = app().bundles();
        for (File bundle : bundles) {
            list.addView(row(bundle, busy));
        }
        String failure = failureText();
        note(failure != null ? failure
                : busy       ? getString(R.string.working)
                             : bundles.isEmpty() ? getString(R.string.none_here) : loadedText());
        showProgress(0, 0);
    }

    private String loadedText() {
        Engine.Loaded loaded = engine().loaded();
        if (loaded == null) {
            return "";
        }
        return getString(R.string.ready, loaded.bundle.getName(), loaded.need.describe(), loaded.threads);
    }

    private View row(final File bundle, boolean busy) {
        View row = getLayoutInflater().inflate(R.layout.bundle, list, false);
        Button load = (Button) row.findViewById(R.id.load);
        load.setText(getString(R.string.load_bundle, bundle.getName()));
        load.setEnabled(!busy);
        load.setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                engine().load(bundle, app().settings(), false);
                finish(); // the conversation tells how it goes
            }
        });
        View delete = row.findViewById(R.id.delete);
        Engine.Loaded loaded = engine().loaded();
        delete.setEnabled(!busy && (loaded == null || !loaded.bundle.equals(bundle)));
        delete.setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                askToDelete(bundle);
            }
        });
        return row;
    }

    private void askToDelete(final File bundle) {
        String size = Memory.megabytes(Bundles.sizeBytes(bundle));
        new AlertDialog.Builder(this)
            .setMessage(getString(R.string.delete_question, bundle.getName(), size))
            .setNegativeButton(R.string.cancel, null)
            .setPositiveButton(R.string.delete,
                new DialogInterface.OnClickListener() {
                    @Override
                    public void onClick(DialogInterface dialog, int which) {
                        engine().delete(Collections.singletonList(bundle));
                    }
                })
            .show();
    }

    @Override
    public void progress(String what, long done, long total) {
        note(getString(R.string.importing, what, Memory.megabytes(done), Memory.megabytes(total)));
        showProgress(done, total);
    }
}
