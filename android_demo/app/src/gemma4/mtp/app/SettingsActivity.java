package gemma4.mtp.app;

import android.app.Activity;
import android.os.Bundle;
import android.view.View;
import android.widget.EditText;
import android.widget.RadioButton;
import android.widget.TextView;
import android.widget.Toolbar;
import gemma4.mtp.ValueError;
import java.util.HashMap;
import java.util.Map;

/** What Settings holds, as fields. */
public final class SettingsActivity extends Activity {
    private static final int[] CHOICES = {R.id.drafting_auto, R.id.drafting_fixed, R.id.drafting_off};
    private static final String[] TEXTS = {"draft_tokens", "temperature", "top_k", "top_p", "threads", "context"};
    private static final int[] VIEWS = {
        R.id.draft_tokens, R.id.temperature, R.id.top_k, R.id.top_p, R.id.threads, R.id.context};

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        setContentView(R.layout.settings);
        setActionBar((Toolbar) findViewById(R.id.bar));
        getActionBar().setDisplayHomeAsUpEnabled(true);
        Settings settings = app().settings();
        if (state == null) {
            Map<String, String> fields = app().fields();
            for (int i = 0; i < TEXTS.length; i++) {
                ((EditText) findViewById(VIEWS[i])).setText(fields.get(TEXTS[i]));
            }
            choice(Settings.DRAFTING.indexOf(settings.drafting)).setChecked(true);
        }
        ((EditText) findViewById(R.id.threads)).setHint(String.valueOf(Settings.usualThreads()));
        ((EditText) findViewById(R.id.context)).setHint(String.valueOf(Settings.CONTEXT_TOKENS));
        findViewById(R.id.save).setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                save();
            }
        });
    }

    private App app() {
        return (App) getApplication();
    }

    private RadioButton choice(int index) {
        return (RadioButton) findViewById(CHOICES[index]);
    }

    private void save() {
        Map<String, String> fields = new HashMap<>();
        for (int i = 0; i < TEXTS.length; i++) {
            fields.put(TEXTS[i], ((EditText) findViewById(VIEWS[i])).getText().toString());
        }
        for (int i = 0; i < CHOICES.length; i++) {
            if (choice(i).isChecked()) {
                fields.put("drafting", Settings.DRAFTING.get(i));
            }
        }
        try {
            Engine engine = app().engine();
            int before = app().settings().contextTokens;
            Settings settings = new Settings(fields);
            if (engine.busy() && before != settings.contextTokens) {
                ((TextView) findViewById(R.id.note)).setText(R.string.busy);
                return;
            }
            app().store(fields);
            Engine.Loaded loaded = engine.loaded();
            Failure failure = engine.failure();
            if (loaded != null && before != settings.contextTokens) {
                engine.load(loaded.bundle, settings, false);
            } else if (loaded == null && failure != null && failure.bundle != null) { // perhaps it loads now
                engine.load(failure.bundle, settings, false);
            }
            finish();
        } catch (ValueError error) {
            ((TextView) findViewById(R.id.note)).setText(error.getMessage());
        }
    }
}
