package gemma4.mtp.app;

import android.app.Activity;
import android.os.Bundle;
import android.view.View;
import android.widget.ProgressBar;
import android.widget.TextView;
import android.widget.Toolbar;

/** A screen that shows what the engine does; its layout has a bar and a note. */
abstract class EngineActivity extends Activity implements Engine.Screen {
    private TextView note;

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        setContentView(layout());
        setActionBar((Toolbar) findViewById(R.id.bar));
        getActionBar().setDisplayHomeAsUpEnabled(getParentActivityIntent() != null);
        note = (TextView) findViewById(R.id.note);
    }

    abstract int layout();

    @Override
    protected void onStart() {
        super.onStart();
        engine().show(this);
        changed();
    }

    @Override
    protected void onStop() {
        engine().hide(this);
        super.onStop();
    }

    App app() {
        return (App) getApplication();
    }

    Engine engine() {
        return app().engine();
    }

    void note(String text) {
        note.setText(text);
    }

    /** Why the last thing came to nothing, or null. */
    String failureText() {
        Failure failure = engine().failure();
        if (failure == null) {
            return null;
        }
        switch (failure.kind) {
            case OUT_OF_MEMORY:
                return getString(R.string.out_of_memory);
            case UNEXPECTED:
                return getString(R.string.unexpected, failure.detail);
            default:
                return failure.detail;
        }
    }

    /** Of a layout with a bar of progress. */
    void showProgress(long done, long total) {
        ProgressBar bar = (ProgressBar) findViewById(R.id.progress);
        bar.setVisibility(engine().busy() ? View.VISIBLE : View.GONE);
        bar.setIndeterminate(total == 0);
        bar.setMax(1000);
        bar.setProgress(total == 0 ? 0 : (int) (1000 * done / total));
    }

    @Override
    public void text(String piece) {}

    @Override
    public void figures() {}

    @Override
    public void progress(String what, long done, long total) {}
}
