/* Registers --environment=NAME with sbatch, salloc and srun, as container engines do, and hands the
   name to the tasks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <slurm/spank.h>

SPANK_PLUGIN(environment, 1);

static char *env_name = NULL;

static int on_environment(int val, const char *optarg, int remote)
{
    (void)val; (void)remote;
    if (!optarg || !*optarg) {
        slurm_error("--environment needs a name");
        return -1;
    }
    free(env_name);
    env_name = strdup(optarg);
    return 0;
}

static struct spank_option opt = {
    "environment", "NAME", "Container environment (stand-in: exported as SLURM_TEST_ENVIRONMENT)",
    1, 0, on_environment
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
    (void)ac; (void)av;
    return spank_option_register(sp, &opt) == ESPANK_SUCCESS ? 0 : -1;
}

/* Per task, in slurmstepd: batch script and each srun task. */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
    (void)ac; (void)av;
    if (env_name)
        spank_setenv(sp, "SLURM_TEST_ENVIRONMENT", env_name, 1);
    return 0;
}
